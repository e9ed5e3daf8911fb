"""Does the cross-fitted score by which stage one chooses a span and a shape of the noise predict held-out density?

For each data set's training rows only: 80% are fitted with spans of several ranks, with the shape of the noise that is
chosen, and with neither; 20% are held out. The score is the gain over neither that stage one sees on the 80%; the truth
is the gain of the full model (two trees) on the 20%, both in nats per row.

python -m benchmarks.choices [--quick] [--data FOLDER]
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits, load_sample_image

import geode_jax
from benchmarks.common import QUICK_DICTIONARY, QUICK_SWEEPS, load_frey, write_result
from benchmarks.real_data import patches
from benchmarks.swiss_roll import make_roll
from benchmarks.tables import load
from geode_jax.forest.feature_scales import noise_scales
from geode_jax.forest.plan import Plan
from geode_jax.learning.evidence import cross_fitted_evidence
from geode_jax.learning.feature_noise import middle_cells
from geode_jax.learning.noise_covariance import is_worth_its_cost, try_noise_covariance
from geode_jax.learning.shared_span import learn_span, learn_subspaces_in_span, span_rank
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import Partition, partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.frame import learn_frame, to_model
from geode_jax.rows.training import Training


def training_sets(quick: bool, folder: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """(name, rows); what other benchmarks test on is left out."""
    yield "flat roll", make_roll(200 if quick else 3000, "flat", 0)[0][: 160 if quick else 2400]
    if quick:
        return
    yield "bent roll", make_roll(3000, "bent", 0)[0][:2400]
    digits = load_digits().data
    digits = digits + np.random.default_rng(0).random(digits.shape)
    yield "digits", digits[np.random.default_rng(0).permutation(len(digits))[:1437]]
    yield "China, 16 x 16", patches(load_sample_image("china.jpg"), 16, 2000, 1).train
    yield "Frey faces", load_frey(folder)[np.random.default_rng(0).permutation(1965)[:1000]]


def prepare(rows: np.ndarray) -> tuple[np.ndarray, Partition, SubspaceOptions, np.ndarray]:
    """Model coordinates, one tree, how subspaces are learned, and folds, as stage one makes them."""
    plan = Plan.of(geode_jax.DictionarySettings(num_trees=1), *rows.shape)
    x = to_model(rows, learn_frame(rows), np.dtype(np.float32))
    graph = neighbour_graph(x, plan.tree.num_neighbors, 0)
    partition = partition_rows(x, graph, plan.tree.depth, plan.tree.min_cell_size, 0)
    scales = noise_scales(x, None, middle_cells(partition), plan.noise(0))
    x = (x / scales).astype(np.float32)
    return x, partition, plan.subspaces(plan.max_rank, 0), assign_folds(len(x), 5, np.random.default_rng(0))


def held_out(
    train: np.ndarray,
    test: np.ndarray,
    quick: bool,
    span: geode_jax.SharedSpan | None = None,
    noise: geode_jax.NoiseCovariance | None = None,
) -> np.ndarray:
    """Log densities of the held-out rows under the full model."""
    own = QUICK_DICTIONARY if quick else {"num_trees": 2}
    sweeps = QUICK_SWEEPS if quick else {"num_warmup": 300, "num_samples": 200}
    posterior = geode_jax.fit(
        jax.random.key(0),
        train,
        dictionary=geode_jax.DictionarySettings(**own, shared_span=span, noise_covariance=noise),
        sampler=geode_jax.SamplerSettings(**sweeps),
    )
    return geode_jax.log_density(posterior, test)


def tables() -> list[str]:
    record = load("choices")
    lines = [
        "### Does the score that chooses predict held-out density?",
        "",
        "A score on training rows decides on a shared span and on a noise covariance. Gains over neither, nats per"
        " row; the rows are training rows in the first split of other tables, and in part test rows in their others:",
        "",
        "| data | of | gain in the score | gain held out |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        held_out = f"{row['held_out_gain']:.2f} ± {row['held_out_error']:.2f}"
        lines.append(f"| {row['data']} | {row['of']} | {row['score_gain']:.2f} | {held_out} |")
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run, nothing written")
    parser.add_argument("--data", help="folder with frey_faces.npz")
    options = parser.parse_args(arguments)
    rows = []
    for name, data in training_sets(options.quick, options.data):
        cut = int(0.8 * len(data))
        x, partition, own_options, folds = prepare(data[:cut])
        whole = learn_span(x, folds, 0)
        training = Training(x, x.shape[1], folds)
        first = span_rank(training, whole)
        own = learn_subspaces(x, partition, own_options, folds)
        score = cross_fitted_evidence(training, partition, own).log_likelihood()
        base = held_out(data[:cut], data[cut:], options.quick)

        def record(of: str, gain: float, density: np.ndarray, name: str = name, base: np.ndarray = base) -> None:
            truth = density - base
            row = {
                "data": name,
                "of": of,
                "score_gain": gain,
                "held_out_gain": float(truth.mean()),
                "held_out_error": float(truth.std() / np.sqrt(truth.size)),
            }
            rows.append(row)
            print(row, flush=True)

        for rank in (first,) if options.quick else (first // 2, first, 2 * first, 4 * first):
            if 0 < rank < whole.bases.shape[2]:
                found = learn_subspaces_in_span(x, whole.leading(rank), partition, own_options, folds)
                gain = cross_fitted_evidence(training, partition, found).log_likelihood() - score
                span = geode_jax.SharedSpan(rank)
                record(
                    f"a span of {rank}", float(gain.mean()), held_out(data[:cut], data[cut:], options.quick, span=span)
                )
        trial = try_noise_covariance(training, partition, own_options, score)
        if is_worth_its_cost(trial.gain, x.shape[1]):
            density = held_out(data[:cut], data[cut:], options.quick, noise=geode_jax.NoiseCovariance())
            record("a noise covariance", trial.gain.mean, density)
    if not options.quick:
        write_result("choices", {}, rows)
    return rows


if __name__ == "__main__":
    main()

"""Candidate nodes: what is lost where rows may belong to a few nodes each, and what a million rows take.

First the same forest with fewer and fewer candidates: held-out density, lost posterior mass, and sweeps per second.
10,000 MNIST images for training, 2000 others of the training set held out, pixels dequantised by uniform noise, two
trees of depth 7. Then rows near a curved set of 5 dimensions in 100, from 10,000 to a million of them, one tree.

python -m benchmarks.candidates [--quick] [--data FOLDER] [--sizes N ...] [--depth L] [--fresh]

An interrupted run goes on where it ended.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import geode_jax
from benchmarks.common import alone, earlier_rows, load_mnist, memory_bytes, timed, write_result
from benchmarks.tables import load, table

NUM_TRAIN, NUM_HELD_OUT = 10_000, 2000
NUM_SWEEPS = 100  # of warm-up, and as many that are kept
NUM_CHAINS = 3  # every number of candidates has as many: they end in modes of their own
CANDIDATES = (255, 32, 16, 8, 4)
SIZES = (10_000, 100_000, 1_000_000)
NUM_FEATURES, INTRINSIC, NOISE = 100, 5, 0.1
LARGE: dict[str, Any] = {"num_trees": 1, "max_rank": 20, "num_candidates": 16}


def peak_gibibytes() -> float:
    """The most memory that this process has had so far; `ru_maxrss` would start at that of its parent. Linux only."""
    return memory_bytes("VmHWM") / 2**30


def sweeps(quick: bool) -> geode_jax.SamplerSettings:
    number = 10 if quick else NUM_SWEEPS
    return geode_jax.SamplerSettings(num_warmup=number, num_samples=number, segment_length=10)


def lost(posterior: geode_jax.Posterior) -> float:
    return 0.0 if posterior.lost_mass is None else float(posterior.lost_mass.mean())


def mebibytes(forest: Any) -> float:
    """What the sampler reads."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(forest.statistics)) / 2**20


def curved_rows(num_rows: int, num_features: int, out: np.ndarray | None = None) -> np.ndarray:
    """Smooth functions of 5 uniform variables, and noise; (n, D) float32, written to `out` where it is given."""
    rng = np.random.default_rng(0)
    waves = rng.normal(size=(INTRINSIC, num_features)).astype(np.float32)
    phase = rng.uniform(0, 2 * np.pi, num_features).astype(np.float32)
    x = np.empty((num_rows, num_features), np.float32) if out is None else out
    for start in range(0, num_rows, 2**16):
        block = x[start : start + 2**16]
        latent = rng.random((len(block), INTRINSIC), dtype=np.float32)
        block[:] = np.sin(2.0 * latent @ waves + phase)
        block += NOISE * rng.standard_normal(block.shape, dtype=np.float32)
    return x


def fewer_and_fewer(data: str | None, quick: bool) -> Iterator[dict[str, Any]]:
    num_train, num_new = (300, 50) if quick else (NUM_TRAIN, NUM_HELD_OUT)
    x = load_mnist(data, num_train + num_new)
    depth, widths = (3, (15, 4)) if quick else (7, CANDIDATES)
    for width in widths:
        settings = geode_jax.DictionarySettings(num_trees=2, depth=depth, num_candidates=width)
        times: dict[str, float] = {}
        with timed(times, "stage one seconds"):
            forest = geode_jax.learn_forest(jax.random.key(0), x[:num_train], dictionary=settings)
        for chain in range(1, 2 if quick else 1 + NUM_CHAINS):
            with timed(times, "sampler seconds"):
                posterior = geode_jax.sample_posterior(jax.random.key(chain), forest, sampler=sweeps(quick))
            density = geode_jax.log_density(posterior, x[num_train:])
            yield {
                "data": "MNIST",
                "rows": num_train,
                "candidates": width,
                "chain": chain,
                "nats": float(density.mean()),
                "lost mass": lost(posterior),
                "statistics MiB": mebibytes(forest),
                **times,
            }


def one_more(number: int, depth: int, quick: bool) -> dict[str, Any]:
    """Rows on the curved set; alone in its process, whose memory it tells of."""
    sampler = sweeps(quick)
    x = curved_rows(number + NUM_HELD_OUT, NUM_FEATURES)
    train, new = x[:number], x[number:]
    # fewer rows have fewer nodes: at least 500 rows in a cell
    own = min(depth, int(np.log2(max(number / 500, 1))))
    settings = geode_jax.DictionarySettings(depth=own, **LARGE)
    times: dict[str, float] = {}
    with timed(times, "stage one seconds"):
        forest = geode_jax.learn_forest(jax.random.key(0), train, dictionary=settings)
    after_stage_one = peak_gibibytes()
    short = dataclasses.replace(sampler, num_warmup=0, num_samples=sampler.segment_length)
    with timed(times, "first sweeps seconds"):  # compilation among them
        geode_jax.sample_posterior(jax.random.key(1), forest, sampler=short)
    with timed(times, "sampler seconds"):
        posterior = geode_jax.sample_posterior(jax.random.key(1), forest, sampler=sampler)
    one_gaussian = geode_jax.fit(
        jax.random.key(0),
        train[:: max(1, number // NUM_TRAIN)],
        dictionary=geode_jax.DictionarySettings(num_trees=1, depth=0, max_rank=LARGE["max_rank"]),
        sampler=sampler,
    )
    return {
        "data": "curved",
        "rows": number,
        "depth": own,
        "candidates": forest.found.num_candidates,
        "nats": float(geode_jax.log_density(posterior, new).mean()),
        "one Gaussian": float(geode_jax.log_density(one_gaussian, new).mean()),
        "lost mass": lost(posterior),
        "sweep ms": 1000 * times["sampler seconds"] / (sampler.num_warmup + sampler.num_samples),
        "statistics MiB": mebibytes(forest),
        "data MiB": train.nbytes / 2**20,
        "peak GiB of stage one": after_stage_one,
        "peak GiB": peak_gibibytes(),
        **times,
    }


def more_and_more(sizes: list[int], depth: int, quick: bool, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    already = {row["rows"] for row in done if row["data"] == "curved"}
    for number in sizes:
        if number not in already:
            yield alone(one_more, number, depth, quick)


def tables() -> list[str]:
    record = load("candidates")
    settings = record["settings"]
    fewer = [row for row in record["rows"] if row["data"] == "MNIST"]
    more = [row for row in record["rows"] if row["data"] == "curved"]
    lines = [
        "### Candidate nodes",
        "",
        "The same two trees of depth 7 with fewer and fewer candidates per row, all 255 nodes first"
        f" ({settings['train']} MNIST images, {settings['held_out']} held out;"
        f" {settings['chains']} chains of {settings['sweeps']} sweeps; timed beside other work):",
        "",
    ]
    rows = []
    for width in dict.fromkeys(row["candidates"] for row in fewer):
        own = [row for row in fewer if row["candidates"] == width]
        nats = [row["nats"] for row in own]
        rows.append(
            [
                str(width),
                f"{np.mean(nats):.1f}",
                f"{min(nats):.1f} to {max(nats):.1f}",
                f"{np.mean([row['lost mass'] for row in own]):.2%}",
                f"{own[0]['statistics MiB']:.0f}",
                f"{own[0]['stage one seconds']:.0f}",
                f"{np.mean([row['sampler seconds'] for row in own]):.0f}",
            ]
        )
    head = ["candidates", "held-out nats", "of chains", "lost mass", "statistics, MiB", "stage one, s", "sampler, s"]
    lines += table(head, rows)
    lines += [
        "",
        f"Rows near a curved set of 5 dimensions in 100, one tree, rank 20, {more[0]['candidates']} candidates,"
        f" {settings['sweeps']} sweeps. Peak memory is that of a process of its own, the data and JAX included:",
        "",
    ]
    rows = [
        [
            f"{row['rows']:,}",
            str(row["depth"]),
            f"{row['nats']:.1f}",
            f"{row['one Gaussian']:.1f}",
            f"{row['lost mass']:.3%}",
            f"{row['stage one seconds']:.0f}",
            f"{row['sweep ms']:.0f}",
            f"{row['sampler seconds']:.0f}",
            f"{row['data MiB']:.0f}",
            f"{row['peak GiB']:.1f}",
        ]
        for row in more
    ]
    head = ["rows", "depth", "held-out nats", "one Gaussian", "lost mass", "stage one, s", "sweep, ms", "sampler, s"]
    return lines + table([*head, "data, MiB", "peak, GiB"], rows)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--data", help="folder that holds mnist.npz")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="rows of the second experiment")
    parser.add_argument("--depth", type=int, default=10, help="of the tree of the largest problem")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have found")
    options = parser.parse_args(arguments)
    settings = {
        "train": NUM_TRAIN,
        "held_out": NUM_HELD_OUT,
        "depth": options.depth,
        "sweeps": 2 * NUM_SWEEPS,
        "chains": NUM_CHAINS,
    }
    rows = [] if options.quick or options.fresh else earlier_rows("candidates", settings)
    images_done = [row for row in rows if row["data"] == "MNIST"]
    is_done = len(images_done) == NUM_CHAINS * len(CANDIDATES)
    if not is_done:
        rows = [row for row in rows if row not in images_done]
    found = more_and_more([2000] if options.quick else options.sizes, options.depth, options.quick, rows[:])
    if not is_done:
        found = itertools.chain(fewer_and_fewer(options.data, options.quick), found)
    for row in found:
        print(row, flush=True)
        rows.append(row)
        if not options.quick:
            write_result("candidates", settings, rows)
    return rows


if __name__ == "__main__":
    main()

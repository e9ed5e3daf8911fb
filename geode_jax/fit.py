"""From an array to a posterior: stage one, the freeze, stage two."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from geode_jax._checks import check_data, check_dtype, check_instance, check_key
from geode_jax._typing import ArrayLike, KeyArray, precision_of
from geode_jax.build.neighbours import neighbour_graph
from geode_jax.build.noise import learn_feature_scales
from geode_jax.build.partition import Partition, default_depth, partition_rows
from geode_jax.build.standardise import Frame, learn_frame, to_model
from geode_jax.build.subspace import assign_folds, learn_subspaces
from geode_jax.dictionary import Dictionary, freeze
from geode_jax.gibbs.run import run_chains
from geode_jax.gibbs.sweep import Problem
from geode_jax.posterior import Posterior
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings
from geode_jax.statistics import Statistics, cross_fitted_statistics


def fit(
    key: KeyArray,
    X: ArrayLike,
    *,
    dictionary: DictionarySettings | None = None,
    prior: Prior | None = None,
    sampler: SamplerSettings | None = None,
    dtype: Any = jnp.float32,
    progress: bool = False,
) -> Posterior:
    """Fit GEODE to the rows of X, shape (n, D), and return draws from its posterior.

    **Arguments:**

    - `key`: a JAX key; everything random in the fit follows from it.
    - `X`: finite numbers, at least 2 different rows; arrays, and pandas or polars frames.
    - `dictionary`, `prior`, `sampler`: settings of stage one, the model, and stage two; None is the default of each.
    - `dtype`: float32 or float64, for the dictionary and the sampler, whatever JAX's global setting.
    - `progress`: show a bar on standard error.

    Raises TypeError or ValueError naming the argument, and FloatingPointError where sampling became non-finite.
    """
    key = check_key(key)
    data = check_data(X, "X", allow_nan=False, min_rows=2)
    real = check_dtype(dtype)
    stage_one = check_instance(dictionary, "dictionary", (DictionarySettings, None)) or DictionarySettings()
    model_prior = check_instance(prior, "prior", (Prior, None)) or Prior()
    stage_two = check_instance(sampler, "sampler", (SamplerSettings, None)) or SamplerSettings()

    key_build, key_run = jax.random.split(key)
    stage_one = resolve(stage_one, *data.shape)
    with (
        precision_of(real),
        tqdm(total=1.0, disable=not progress, bar_format="{desc:<28}|{bar:30}| {percentage:3.0f}% [{elapsed}]") as bar,
    ):
        show = _Progress(bar)
        frame, problems, frozen = _build(key_build, data, stage_one, model_prior, stage_two, real, show)
        samples = run_chains(key_run, problems, stage_two, show.sweeps)
    return Posterior(
        dictionary=frozen,
        draws=samples.draws,
        adaptation=samples.adaptation,
        shift=frame.shift,
        scale=frame.scale,
        dictionary_settings=stage_one,
        prior=model_prior,
        sampler_settings=stage_two,
    )


class _Progress:
    """One bar over both stages: the first tenth is stage one."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def _move(self, position: float, text: str) -> None:
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(max(position - self._bar.n, 0.0))

    def stage(self, done: int, total: int, text: str) -> None:
        self._move(0.1 * done / total, text)

    def sweeps(self, done: int, total: int) -> None:
        self._move(0.1 + 0.9 * done / total, f"sweep {done} of {total}")


def resolve(settings: DictionarySettings, num_rows: int, num_features: int) -> DictionarySettings:
    """Fill in what was left to the data's shape.

    `max_rank`: 50, but at most half the features beyond 20, and no more than the data allow. `num_neighbors`: 10, or
    more for very large n. `min_cell_size`: 20 rows, below which a cell's own centre and directions cost more than they
    bring. `depth`: until cells reach twice that size, at most 7.
    """
    limit = min(num_features, num_rows - 1)
    max_rank = min(settings.max_rank or min(50, max(10, num_features // 2)), limit)
    num_neighbors = min(settings.num_neighbors or max(10, int(np.log2(num_rows))), num_rows - 1)
    min_cell_size = settings.min_cell_size or max(2, min(20, num_rows // 4))
    depth = settings.depth
    if depth is None:
        depth = default_depth(num_rows, 2 * min_cell_size)
    return dataclasses.replace(
        settings,
        max_rank=max_rank,
        num_neighbors=num_neighbors,
        min_cell_size=min_cell_size,
        depth=depth,
    )


def _build(
    key: KeyArray,
    data: np.ndarray,
    settings: DictionarySettings,
    prior: Prior,
    sampler: SamplerSettings,
    dtype: np.dtype,
    progress: _Progress,
) -> tuple[Frame, Problem, Dictionary]:
    """Stage one: the frame, and per tree the problem to sample and the dictionary for new rows (leading axis F)."""
    assert settings.max_rank is not None
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32))
    seeds = rng.integers(2**31, size=settings.num_trees)
    frame = learn_frame(data)
    x = to_model(data, frame, dtype)
    steps = 2 * settings.num_trees + 1
    partitions = []
    for number, seed in enumerate(seeds):
        progress.stage(number, steps, "growing trees")
        partitions.append(_grow_tree(x, settings, number, int(seed)))
    if settings.feature_noise is not None:
        progress.stage(settings.num_trees, steps, "noise scales")
        scales = learn_feature_scales(
            x,
            partitions[0],
            settings.max_rank,
            seed=int(seeds[0]),
            num_rounds=settings.feature_noise.num_rounds,
            num_folds=settings.feature_noise.num_folds,
            floor=settings.feature_noise.floor,
        )
        frame = Frame(frame.shift, frame.scale * scales)
        x = to_model(data, frame, dtype)
    folds = None
    if settings.cross_fit is not None:
        folds = assign_folds(data.shape[0], settings.cross_fit.num_folds, rng)
    problems, dictionaries = [], []
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        progress.stage(settings.num_trees + 1 + number, steps, "learning dictionaries")
        frozen, statistics = _learn_dictionary(x, partition, settings.max_rank, folds, int(seed))
        dictionaries.append(frozen)
        problems.append(
            Problem(
                tree=frozen.tree,
                statistics=statistics,
                is_available=frozen.is_available & frozen.tree.is_present[:, None],
                prior=prior,
                shrinkage=sampler.shrinkage,
                num_features=data.shape[1],
            )
        )
    return frame, _stack(problems), _stack(dictionaries)


def _grow_tree(x: np.ndarray, settings: DictionarySettings, number: int, seed: int) -> Partition:
    """Trees of a forest differ by their METIS seed and their neighbour count."""
    assert settings.num_neighbors is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    num_neighbors = min(settings.num_neighbors + 2 * number, x.shape[0] - 1)
    graph = neighbour_graph(x, num_neighbors, seed)
    return partition_rows(x, graph, settings.depth, settings.min_cell_size, seed)


def _learn_dictionary(
    x: np.ndarray, partition: Partition, max_rank: int, folds: np.ndarray | None, seed: int
) -> tuple[Dictionary, Statistics]:
    subspaces = learn_subspaces(x, partition, max_rank, folds, seed)
    frozen = freeze(partition, subspaces, 0)
    if folds is None:
        rows = [jnp.arange(x.shape[0])]
        centres, bases = subspaces.centres[:1], subspaces.bases[:1]
    else:
        rows = [jnp.asarray(np.flatnonzero(folds == fold)) for fold in range(int(folds.max()) + 1)]
        centres, bases = subspaces.centres[1:], subspaces.bases[1:]
    statistics = cross_fitted_statistics(jnp.asarray(centres), jnp.asarray(bases), frozen, jnp.asarray(x), rows)
    return frozen, statistics


def _stack(items: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)

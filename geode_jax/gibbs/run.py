"""Many sweeps: a scan in segments, chains and trees as batch axes, draws streamed to the host."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Int, KeyArray
from geode_jax.gibbs.chain import Adaptation, Chain, Draw, draw_of, initial_chain, step
from geode_jax.gibbs.sweep import Problem
from geode_jax.settings import RankAdaptation, SamplerSettings


class Samples(NamedTuple):
    """Kept draws with axes (F, C, T, ...) and tallies with axes (F, C, ...)."""

    draws: Draw
    adaptation: Adaptation


@partial(jax.jit, static_argnames=("length", "adaptation"), donate_argnames="chains")
def _segment(
    keys: KeyArray,
    chains: Chain,
    problems: Problem,
    first: Int[Array, ""],
    num_warmup: Int[Array, ""],
    *,
    length: int,
    adaptation: RankAdaptation | None,
) -> tuple[Chain, Draw]:
    """`length` sweeps of every chain (axis 1) of every tree (axis 0); draws get a time axis after those."""

    def one_chain(key: KeyArray, chain: Chain, problem: Problem) -> tuple[Chain, Draw]:
        def advance(chain: Chain, index: Array) -> tuple[Chain, Draw]:
            # a sweep's randomness depends on the chain's key and the sweep's number only, not on the segment
            chain = step(jax.random.fold_in(key, index), problem, num_warmup, adaptation, chain, index)
            return chain, draw_of(chain, problem)

        return lax.scan(advance, chain, first + jnp.arange(length))

    over_chains = jax.vmap(one_chain, in_axes=(0, 0, None))
    return jax.vmap(over_chains)(keys, chains, problems)


@jax.jit
def _start(keys: KeyArray, problems: Problem) -> Chain:
    return jax.vmap(jax.vmap(initial_chain, in_axes=(0, None)))(keys, problems)


def run_chains(
    key: KeyArray,
    problems: Problem,
    settings: SamplerSettings,
    on_segment: Callable[[int, int], None] | None = None,
) -> Samples:
    """Run every chain on every tree; `problems` has a leading axis F on its arrays.

    `on_segment(done, total)` is called after every segment with the sweeps done so far. Raises FloatingPointError where
    a log joint is not finite: the draws before it would be worthless.
    """
    num_trees = problems.statistics.residual.shape[0]
    keys = jax.random.split(key, (num_trees, settings.num_chains, 2))
    chains = _start(keys[..., 0], problems)
    total = settings.num_warmup + settings.num_samples * settings.thinning
    kept: list[Draw] = []
    for first in range(0, total, settings.segment_length):
        chains, draws = _segment(
            keys[..., 1],
            chains,
            problems,
            jnp.asarray(first, jnp.int32),
            jnp.asarray(settings.num_warmup, jnp.int32),
            length=settings.segment_length,
            adaptation=settings.adaptation,
        )
        if not np.isfinite(draws.log_joint).all():
            raise FloatingPointError(
                f"the log joint became non-finite between sweeps {first} and {first + settings.segment_length};"
                " use dtype float64, or look for features of very different size"
            )
        # Sweeps past the end of the last segment are dropped: one compiled length serves every segment.
        index = np.arange(first, first + settings.segment_length)
        since = index - settings.num_warmup
        wanted = np.flatnonzero((since >= 0) & (index < total) & (since % settings.thinning == settings.thinning - 1))
        if wanted.size:
            kept.append(jax.tree.map(lambda leaf, w=wanted: np.asarray(leaf)[:, :, w], draws))
        if on_segment is not None:
            on_segment(min(first + settings.segment_length, total), total)
    draws = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=2), *kept)
    return Samples(draws, jax.tree.map(np.asarray, chains.adaptation))

"""Many sweeps: a scan in segments, chains and trees as batch axes, draws streamed to the host."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, Int, KeyArray
from geode_jax.checkpoint import Checkpoint
from geode_jax.gibbs.chain import Adaptation, Chain, Draw, draw_of, initial_chain, step
from geode_jax.gibbs.sweep import Problem
from geode_jax.settings import RankAdaptation, SamplerSettings
from geode_jax.storage import fields_of


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


class Interrupted(KeyboardInterrupt):
    """A run was interrupted after some draws were kept: `samples` holds them."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples


def run_chains(
    key: KeyArray,
    problems: Problem,
    settings: SamplerSettings,
    on_segment: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Samples:
    """Run every chain on every tree; `problems` has a leading axis F on its arrays.

    `on_segment(done, total)` is called after every segment with the sweeps done so far. With a `checkpoint` the run
    begins where its last segment ended, and gives the same draws as one that was never stopped.

    Raises FloatingPointError where a log joint is not finite: the draws before it would be worthless. Raises
    Interrupted in place of KeyboardInterrupt where draws were kept.
    """
    run = _Run(key, problems, settings, checkpoint)
    try:
        while run.done < run.total:
            run.advance()
            if on_segment is not None:
                on_segment(min(run.done, run.total), run.total)
    except KeyboardInterrupt:
        if run.kept:
            raise Interrupted(run.samples()) from None
        raise
    return run.samples()


class _Run:
    """A run as it stands: `done` sweeps of `total`, where the chains are, the draws `kept` so far."""

    def __init__(
        self, key: KeyArray, problems: Problem, settings: SamplerSettings, checkpoint: Checkpoint | None
    ) -> None:
        self.problems, self.settings, self.checkpoint = problems, settings, checkpoint
        num_trees = problems.statistics.residual.shape[0]
        keys = jax.random.split(key, (num_trees, settings.num_chains, 2))
        self.keys = keys[..., 1]
        self.total = settings.num_warmup + settings.num_samples * settings.thinning
        self.done = 0
        self.kept: list[Draw] = []
        if not self._resume(keys[..., 0]):
            self.chains = _start(keys[..., 0], problems)
        self._tally()

    def _resume(self, keys: KeyArray) -> bool:
        """Read what an earlier run left, if any."""
        found = self.checkpoint and self.checkpoint.read("chains")
        if not found:
            return False
        assert self.checkpoint is not None
        header, arrays = found
        leaves = [jnp.asarray(arrays[f"leaf {number}"]) for number in range(len(arrays))]
        self.chains = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(_start, keys, self.problems)), leaves)
        self.done = header["done"]
        for name in header["draws"]:
            draws = self.checkpoint.read(name)
            if draws is None:
                raise ValueError(f"checkpoint: expected a file {name}.npz in {self.checkpoint.folder}, got none")
            self.kept.append(jax.tree.map(np.asarray, Draw(**jax.tree.map(jnp.asarray, draws[1]))))
        return True

    def advance(self) -> None:
        """One segment more."""
        settings, first = self.settings, self.done
        chains, draws = _segment(
            self.keys,
            self.chains,
            self.problems,
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
        thinning = settings.thinning
        wanted = np.flatnonzero((since >= 0) & (index < self.total) & (since % thinning == thinning - 1))
        if wanted.size:
            self.kept.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:, :, wanted], draws))
        self.chains, self.done = chains, first + settings.segment_length
        self._tally()
        if self.checkpoint is not None:
            if wanted.size:
                self.checkpoint.write(f"draws {len(self.kept)}", {}, fields_of(self.kept[-1]))
            names = [f"draws {number + 1}" for number in range(len(self.kept))]
            leaves = enumerate(jax.tree.leaves(chains))
            arrays = {f"leaf {number}": np.asarray(leaf) for number, leaf in leaves}
            self.checkpoint.write("chains", {"done": self.done, "draws": names}, arrays)

    def _tally(self) -> None:
        """Take the tallies off the device: an interrupted segment may have taken the chains' memory with it."""
        self.tallies = jax.tree.map(np.asarray, self.chains.adaptation)

    def samples(self) -> Samples:
        """The draws kept so far."""
        draws = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=2), *self.kept)
        return Samples(draws, self.tallies)

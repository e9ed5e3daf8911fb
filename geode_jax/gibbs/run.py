"""Many sweeps: a scan in segments, several chains and trees as batch axes, draws streamed to the host."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from geode_jax._files.archive import fields_of
from geode_jax._files.checkpoint import Checkpoint, Found
from geode_jax._runtime.blas import lapack_turn
from geode_jax._runtime.compilation import drop_programs_if_many, quickly_compiled
from geode_jax._runtime.devices import everywhere
from geode_jax._typing import Array, Int, KeyArray
from geode_jax.gibbs.chain import Chain, draw_of, initial_chain, missing_norms, step, without_rows
from geode_jax.gibbs.packing import packed, unpacked
from geode_jax.gibbs.sharding import (
    BY_CHAIN,
    BY_TREE,
    CHAINS,
    TREES,
    chain_shardings,
    check_same,
    fetch,
    fetch_own,
    own_shape,
    place,
    place_own,
    place_problem,
    with_all_axes,
)
from geode_jax.model.draw import Adaptation, Draw
from geode_jax.model.problem import Problem
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.settings import RankAdaptation, SamplerSettings

Result = TypeVar("Result")


class Samples(NamedTuple):
    """Kept draws with axes (F, C, T, ...) and tallies with axes (F, C, ...)."""

    draws: Draw
    adaptation: Adaptation


# Up to so many numbers read by all its sweeps together, a run takes less time than to optimise its program would:
# 200 sweeps of iris read 2**24, of diabetes (442 x 10) 2**27.4, of breast cancer (569 x 30) 2**29.
SHORT_RUN = 2**28


class SegmentOptions(NamedTuple):
    """What a segment's program is compiled for: its number of sweeps, how ranks adapt, and the devices."""

    length: int
    adaptation: RankAdaptation | None
    mesh: Mesh | None = None


@partial(quickly_compiled, static_argnames="options", donate_argnames="chains")
def _segment(
    keys: KeyArray,
    chains: Chain,
    problems: Problem,
    first: Int[Array, ""],
    num_warmup: Int[Array, ""],
    *,
    options: SegmentOptions,
) -> tuple[Chain, Draw]:
    """`options.length` sweeps of every chain (axis 1) of every tree (axis 0); draws get a time axis after those.

    With a mesh, devices run their own trees and chains, and share the rows of a tree.
    """

    def one_chain(key: KeyArray, chain: Chain, problem: Problem) -> tuple[Chain, Draw]:
        def advance(chain: Chain, of_sweep: tuple[KeyArray, Array, Array | None]) -> tuple[Chain, Array]:
            sweep_key, index, norms = of_sweep
            chain = step(sweep_key, problem, num_warmup, options.adaptation, chain, index, norms)
            return chain, packed(without_rows(chain), chain.state.log_sigma2.dtype)

        # a sweep's randomness depends on the chain's key and the sweep's number only, not on the segment
        index = first + jnp.arange(options.length)
        keys = jax.vmap(partial(jax.random.fold_in, key))(index)
        chain, rows = lax.scan(advance, chain, (keys, index, missing_norms(keys, chain, problem)))
        kept = unpacked(rows, jax.eval_shape(without_rows, chain))
        return chain, jax.vmap(draw_of, in_axes=(0, 0, None))(keys, kept, problem)

    all_chains = partial(_of_all_chains, one_chain)
    mesh = options.mesh
    if mesh is None:
        return all_chains(keys, chains, problems)
    # shard_map over trees and chains: partitioned by the compiler, rejection loops (for partial rows) would wait for
    # each other across devices
    apart = jax.shard_map(
        all_chains,
        mesh=mesh,
        in_specs=(BY_CHAIN, BY_CHAIN, BY_TREE),
        out_specs=BY_CHAIN,
        axis_names={TREES, CHAINS},
        check_vma=False,
    )
    chains, draws = apart(keys, chains, problems)
    return chains, lax.with_sharding_constraint(draws, everywhere(mesh))


def _of_all_chains(function: Callable[..., Result], keys: KeyArray, *rest: Any) -> Result:
    """A function of one chain for all chains (axis 1) of all trees (axis 0); its last argument is a tree's problem."""
    num_trees, num_chains = keys.shape
    over_chains = _vmapped(function, (0,) * len(rest) + (None,), num_chains)
    return _vmapped(over_chains, (0,) * (len(rest) + 1), num_trees)(keys, *rest)


def _vmapped(function: Callable[..., Result], in_axes: tuple[int | None, ...], size: int) -> Callable[..., Result]:
    """``jax.vmap`` over a leading axis of this size.

    An axis of one is taken away and put back instead: every ``jax.vmap`` adds about as much time to trace as the
    function itself takes, and fits have one chain unless told otherwise.
    """
    if size > 1:
        return jax.vmap(function, in_axes=in_axes)

    def alone(*args: Any) -> Result:
        own = [arg if axis is None else _without_axis(arg) for arg, axis in zip(args, in_axes, strict=True)]
        return jax.tree.map(lambda leaf: lax.expand_dims(leaf, (0,)), function(*own))

    return alone


def _without_axis(values: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), values)


@partial(jax.jit, static_argnums=(1, 2))
def _keys(key: KeyArray, num_trees: int, num_chains: int) -> tuple[KeyArray, KeyArray]:
    """Keys of every chain, (F, C): to start it, and for its sweeps."""
    keys = jax.random.split(key, (num_trees, num_chains, 2))
    return keys[..., 0], keys[..., 1]


@partial(quickly_compiled, static_argnames="mesh")
def _start(keys: KeyArray, problems: Problem, mesh: Mesh | None = None) -> Chain:
    chains = _of_all_chains(initial_chain, keys, problems)
    return chains if mesh is None else lax.with_sharding_constraint(chains, chain_shardings(chains, mesh))


def compile_ahead(key: KeyArray, problems: Problem, settings: SamplerSettings) -> None:
    """Compile what a run on the default device needs; `problems` has shapes in place of arrays."""
    num_trees = problems.statistics.residual.shape[0]
    keys = jax.eval_shape(lambda it: jax.random.split(it, (num_trees, settings.num_chains)), key)
    number = jax.ShapeDtypeStruct((), np.int32)
    is_short = _is_short(problems, settings)
    chains = _start.compile(keys, problems, None, is_short=is_short)
    chains = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), chains)
    options = SegmentOptions(settings.segment_length, settings.adaptation)
    _segment.compile(keys, chains, problems, number, number, options=options, is_short=is_short)


def _is_short(problems: Problem, settings: SamplerSettings) -> bool:
    """Whether a run will take less time than to optimise its program: by how many numbers its sweeps read."""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(problems))
    return numbers * _num_sweeps(settings) * settings.num_chains <= SHORT_RUN


def _num_sweeps(settings: SamplerSettings) -> int:
    return settings.num_warmup + settings.num_samples * settings.thinning


class Interrupted(KeyboardInterrupt):
    """The run was interrupted after some draws were kept; they are in `samples`."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples


def run_chains(
    key: KeyArray,
    problems: Problem,
    settings: SamplerSettings,
    on_segment: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
    mesh: Mesh | None = None,
    processes: Processes = ALONE,
) -> Samples:
    """Run every chain on every tree; `problems` has a leading axis F on its arrays.

    `on_segment(done, total)` is called after every segment with the sweeps done so far. With a `checkpoint` the run
    resumes after the last saved segment, and gives the same draws as one that was never stopped. With a `mesh` its
    devices share the work (see `sharding.py`); draws are those of one device, up to the order of summation.
    `processes`: those that bring their own rows; `problems` is then about the rows of this one.

    Raises FloatingPointError if a log joint is not finite: the earlier draws would be worthless too. Raises Interrupted
    in place of KeyboardInterrupt if draws were kept.
    """
    drop_programs_if_many()
    # a sweep factors matrices only if rows have missing features
    lapack = contextlib.nullcontext if problems.partial is None else partial(lapack_turn, jax.default_backend())
    with lapack():
        run = _Run(key, problems, settings, checkpoint, mesh, processes)
    try:
        while run.done < run.total:
            with lapack():
                run.advance()
            if on_segment is not None:
                on_segment(min(run.done, run.total), run.total)
        return run.take_samples()
    except KeyboardInterrupt:
        if run.has_draws and processes.is_alone:  # processes may have kept different numbers of draws
            raise Interrupted(run.take_samples()) from None
        raise


class _Run:
    """The state of a run: `done` sweeps of `total`, the current `chains`, and the draws `kept` so far.

    `sent`: chains and draws of the next segment, which is on its way.
    """

    def __init__(
        self,
        key: KeyArray,
        problems: Problem,
        settings: SamplerSettings,
        checkpoint: Checkpoint | None,
        mesh: Mesh | None,
        processes: Processes = ALONE,
    ) -> None:
        self.settings, self.checkpoint, self.processes = settings, checkpoint, processes
        self.mesh = None if mesh is None else with_all_axes(mesh)
        num_trees = problems.statistics.residual.shape[0]
        start, self.keys = _keys(key, num_trees, settings.num_chains)
        if self.mesh is None:
            self.problems = jax.device_put(problems)
        else:
            if self.mesh.is_multi_process:
                check_same(problems, processes)
            self.problems = place_problem(problems, self.mesh, None if processes.is_alone else processes.sizes)
            start, self.keys = (place(part, NamedSharding(self.mesh, BY_CHAIN)) for part in (start, self.keys))
        self.total = _num_sweeps(settings)
        # not by the rows of this process: all must compile the same program
        self.is_short = _is_short(problems if processes.is_alone else self.problems, settings)
        self.done = 0
        self.kept: list[Draw] = []
        # draws leaf by leaf, and those leaves whose segments are joined
        self.by_leaf: list[tuple[np.ndarray, ...]] = []
        self.joined: list[np.ndarray] = []
        self.sent: tuple[Chain, Draw] | None = None
        if not self._resume(start):
            self.chains = _start(start, self.problems, self.mesh, is_short=self.is_short)
        self.tallies = fetch(self.chains.adaptation)

    def _resume(self, keys: KeyArray) -> bool:
        """Resume from the checkpoint of an earlier run; False if there is none."""
        found = self._latest()
        if found is None:
            return False
        assert self.checkpoint is not None
        header, arrays = found
        shape = jax.eval_shape(_start, keys, self.problems)
        leaves = [arrays.get(f"leaf {number}") for number in range(len(arrays))]
        expected = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(shape)]
        if self.mesh is not None and not self.processes.is_alone:
            shardings = jax.tree.leaves(chain_shardings(shape, self.mesh))
            pairs = zip(shardings, expected, strict=True)
            expected = [(own_shape(sharding, whole), dtype) for sharding, (whole, dtype) in pairs]
        if [leaf is not None and (leaf.shape, leaf.dtype) for leaf in leaves] != expected:
            raise ValueError(f"checkpoint: arrays in {self.checkpoint.folder} are not those of the chains of this fit")
        chains = jax.tree.unflatten(jax.tree.structure(shape), leaves)
        if self.mesh is None:
            self.chains = jax.device_put(chains)
        elif self.processes.is_alone:
            self.chains = jax.tree.map(place, chains, chain_shardings(chains, self.mesh))
        else:
            by_leaf = chains, chain_shardings(chains, self.mesh), shape
            self.chains = jax.tree.map(lambda own, sharding, whole: place_own(own, sharding, whole.shape), *by_leaf)
        self.done = header["done"]
        for name in header["draws"]:
            draws = self.checkpoint.read(name)
            if draws is None:
                raise ValueError(f"checkpoint: expected a file {name}.npz in {self.checkpoint.folder}, got none")
            self.kept.append(jax.tree.map(np.asarray, Draw(**jax.device_put(draws[1]))))
        return True

    @property
    def _saves_own_chains(self) -> bool:
        """Whether every process saves chains of its own, and waits for the others to have saved theirs."""
        return self.checkpoint is not None and not self.processes.is_alone

    def _latest(self) -> Found | None:
        """Header and arrays of the latest chains that were saved; None if there are none.

        Where processes bring their own rows, the latest that all of them have.
        """
        if self.checkpoint is None:
            return None
        if self.processes.is_alone:
            found = self.checkpoint.read("chains")
            if self.mesh is not None and self.mesh.is_multi_process:
                _check_shared(self.checkpoint, 0 if found is None else found[0]["done"])
            return found
        kept = [self.checkpoint.read(f"chains {number}") for number in range(2)]
        own = np.array([0 if found is None else found[0]["done"] for found in kept])
        everyones = self.processes.each(own)
        common = [done for done in own.tolist() if done and (everyones == done).any(axis=1).all()]
        latest = max(common, default=0)
        for number in np.flatnonzero(own > latest).tolist():  # it must not be taken for that of the run that follows
            self.checkpoint.forget(f"chains {number}")
        return kept[own.tolist().index(latest)] if common else None

    def advance(self) -> None:
        """Run one more segment, and send off the one after it before draws are copied to the host."""
        settings, first = self.settings, self.done
        chains, draws = self.sent or self._send()
        self.sent = None
        if not np.isfinite(draws.log_joint).all():
            raise FloatingPointError(
                f"the log joint became non-finite between sweeps {first} and {first + settings.segment_length};"
                " use dtype float64, or look for features of very different size"
            )
        self.chains, self.done = chains, first + settings.segment_length
        # the next segment takes the chains' memory, also if it is interrupted
        self.tallies = fetch(chains.adaptation)
        fetched = fetch if self.processes.is_alone else fetch_own
        leaves = [] if self.checkpoint is None else jax.tree.leaves(fetched(chains))
        try:
            # With missing values a sweep factors matrices, which is done in this thread's turn: it must end here.
            # So it must where processes wait for each other below: sums of a segment on its way may come in between.
            if self.done < self.total and self.problems.partial is None and not self._saves_own_chains:
                self.sent = self._send()
        finally:
            self._keep(first, draws, leaves)
        if self._saves_own_chains:
            # the next chains overwrite those before these, which every process must have saved
            self.processes.total(np.zeros(1))

    def _keep(self, first: int, draws: Draw, leaves: list[np.ndarray]) -> None:
        """Copy the draws of the segment that began at a sweep to the host; save them, and the chains' `leaves`."""
        settings = self.settings
        # Every segment has the same length, so that it is compiled once: sweeps beyond `total` are dropped.
        index = np.arange(first, self.done)
        since = index - settings.num_warmup
        thinning = settings.thinning
        wanted = np.flatnonzero((since >= 0) & (index < self.total) & (since % thinning == thinning - 1))
        if wanted.size:
            self.kept.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:, :, wanted], draws))
        if self.checkpoint is not None:
            if wanted.size:
                self.checkpoint.write(f"draws {len(self.kept)}", {}, fields_of(self.kept[-1]))
            names = [f"draws {number + 1}" for number in range(len(self.kept))]
            arrays = {f"leaf {number}": leaf for number, leaf in enumerate(leaves)}
            name = "chains"
            if not self.processes.is_alone:
                # The one before stays until every process has this one, so that there is one that all have.
                name = f"chains {self.done // settings.segment_length % 2}"
            self.checkpoint.write(name, {"done": self.done, "draws": names}, arrays)

    def _send(self) -> tuple[Chain, Draw]:
        """Send off the segment after the sweeps done."""
        return _segment(
            self.keys,
            self.chains,
            self.problems,
            np.asarray(self.done, np.int32),
            np.asarray(self.settings.num_warmup, np.int32),
            options=SegmentOptions(self.settings.segment_length, self.settings.adaptation, self.mesh),
            is_short=self.is_short,
        )

    @property
    def has_draws(self) -> bool:
        """Whether there are draws to take."""
        return bool(self.kept or self.by_leaf)

    def take_samples(self) -> Samples:
        """The draws kept so far, which the run then no longer holds: a second copy might not fit.

        Called again after Ctrl-C, it goes on with what is not joined yet.
        """
        if not self.by_leaf:
            self.structure = jax.tree.structure(self.kept[0])
            self.by_leaf = list(zip(*(jax.tree.leaves(draws) for draws in self.kept), strict=True))
        self.kept.clear()
        while (number := len(self.joined)) < len(self.by_leaf):
            self.joined.append(np.concatenate(self.by_leaf[number], axis=2))
            self.by_leaf[number] = ()
        return Samples(jax.tree.unflatten(self.structure, self.joined), self.tallies)


def _check_shared(checkpoint: Checkpoint, done: int) -> None:
    """Raise ValueError if the processes of a mesh, each with all rows, would go on from different sweeps."""
    try:
        multihost_utils.assert_equal(done)
    except AssertionError:
        raise ValueError(
            f"checkpoint: expected a folder that all processes share, but they find different progress in"
            f" {checkpoint.folder}"
        ) from None

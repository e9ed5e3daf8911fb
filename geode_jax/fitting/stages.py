"""What all fits share: arguments, the two stages, interruption by Ctrl-C, and the returned posterior."""

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from geode_jax._checks import check_dtype, check_instance, check_mesh
from geode_jax._files.checkpoint import Checkpoint, open_checkpoint
from geode_jax._runtime.devices import may_call_lapack, num_xla_threads
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._runtime.progress import ShowProgress
from geode_jax._runtime.warning import warn_user
from geode_jax._typing import Array, KeyArray
from geode_jax.forest.forest import Forest
from geode_jax.gibbs.run import Interrupted, Samples, compile_ahead, run_chains
from geode_jax.gibbs.sharding import CHAINS, ROWS, TREES
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.held_out import lost_mass
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """Arguments of a fit, checked; see :func:`geode_jax.fit` for what they mean."""

    dictionary: DictionarySettings
    prior: Prior
    sampler: SamplerSettings
    dtype: np.dtype
    progress: bool
    checkpoint: Any
    mesh: Mesh | None
    process_local: bool = False

    @classmethod
    def checked(cls, **given: Any) -> "Request":
        """From the arguments as given. Raises TypeError or ValueError naming the argument."""
        dictionary = check_instance(given["dictionary"], "dictionary", (DictionarySettings, None))
        return cls.for_trees(None, **{**given, "dictionary": dictionary or DictionarySettings()})

    @classmethod
    def for_trees(cls, num_trees: int | None, **given: Any) -> "Request":
        """As :meth:`checked`, for `num_trees` trees that are already learned; None takes the number in the settings."""
        dictionary = given["dictionary"]
        sampler = check_instance(given["sampler"], "sampler", (SamplerSettings, None)) or SamplerSettings()
        trees = dictionary.num_trees if num_trees is None else num_trees
        mesh = check_mesh(given["mesh"], {TREES: trees, CHAINS: sampler.num_chains, ROWS: None})
        return cls(
            dictionary=dictionary,
            prior=check_instance(given["prior"], "prior", (Prior, None)) or Prior(),
            sampler=sampler,
            dtype=check_dtype(given["dtype"]),
            progress=check_instance(given["progress"], "progress", bool),
            checkpoint=given["checkpoint"],
            mesh=mesh,
            process_local=check_instance(given.get("process_local", False), "process_local", bool),
        )

    @property
    def compared(self) -> list[Any]:
        """What processes that bring their own rows compare."""
        return [self.dictionary, self.prior, self.sampler, self.dtype.name, self.checkpoint is None]

    @property
    def row_devices(self) -> int | None:
        """How many devices share the rows of a tree; None without a mesh."""
        return None if self.mesh is None else self.mesh.shape.get(ROWS, 1)

    def check_missing(self) -> None:
        """Raise ValueError if the devices of the mesh cannot sample rows with missing values."""
        if self.mesh is not None and not may_call_lapack(self.mesh):
            raise ValueError(
                "mesh: with missing values XLA needs more threads than the mesh has CPU devices, else it can deadlock;"
                f" got {num_xla_threads()} threads: before JAX starts set the environment variable NPROC to more than"
                " the number of devices, in every process alike, or use fewer devices"
            )

    def open_checkpoint(self, key: KeyArray, arrays: list[np.ndarray]) -> AbstractContextManager[Checkpoint | None]:
        """The checkpoint of the fit of these arrays, held while the context lasts; None if no folder was given."""
        settings = [self.dictionary, self.prior, self.sampler, self.dtype.name]
        return open_checkpoint(self.checkpoint, key, arrays, settings, self.mesh)


class CompileAhead:
    """Compiles the sampler's programs in a thread of its own, while stage one still learns the dictionaries.

    It changes nothing but time: what the thread did not compile, or compiled for other settings of JAX, is compiled
    when it is called. A compilation cannot be stopped: if stage one fails or is interrupted, the thread ends by itself.
    """

    def __init__(self, key: KeyArray, request: Request) -> None:
        self._key, self._request = key, request
        self._running: list[Future[None]] = []

    def start(self, forest: Forest) -> None:
        """Begin to compile for a forest of shapes in place of arrays, on the default device: not for a mesh."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="geode_jax-compile")
        # local to the user's thread, where it is set as a context
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        self._running.append(pool.submit(self._compile, forest, device))
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for what was begun: to compile a program twice would take longer."""
        for future in self._running:
            if (error := future.exception()) is not None:
                _log.debug("the sampler was not compiled ahead", exc_info=error)

    def _compile(self, forest: Forest, device: Any) -> None:
        prior, sampler = self._request.prior, self._request.sampler
        with jax_settings(self._request.dtype), jax.default_device(device):
            problem = jax.eval_shape(lambda it: it.problem(prior, sampler), forest)
            compile_ahead(self._key, problem, sampler)


def kept_forest(
    kept: Checkpoint | None, grow: Callable[[], Forest], mesh: Mesh | None, processes: Processes = ALONE
) -> Forest:
    """The forest saved in the checkpoint, or a new one, which is then saved there.

    With a mesh, the rows' statistics stay on the host until each device gets its part. Where processes bring
    their own rows, they learn it together unless all have saved theirs.
    """
    found = kept and kept.read("forest")
    if kept is not None and not processes.each(np.array(int(found is not None))).all():
        found = None
    if found:
        return Forest.from_archive(*found, on_device=mesh is None)
    forest = grow()
    if kept is not None:
        kept.write("forest", *forest.to_archive())
    return forest


def sample_forests(
    key: KeyArray,
    forests: list[Forest],
    request: Request,
    show: ShowProgress,
    kept: Checkpoint | None,
    is_last: bool = True,
    processes: Processes = ALONE,
) -> list[Samples]:
    """Draws of every forest, all of one shape, from one run of the sampler.

    Interrupted by Ctrl-C after warm-up, it returns the draws made so far, with a warning, if these are the last forests
    of the fit (`is_last`). Otherwise it raises KeyboardInterrupt, as the remaining forests would have no draws.
    """
    problems = [forest.problem(request.prior, request.sampler) for forest in forests]
    together = problems[0] if len(problems) == 1 else jax.tree.map(_concatenated, *problems)

    def on_segment(done: int, total: int) -> None:
        show(done / total, f"sweep {done} of {total}")

    try:
        samples = run_chains(key, together, request.sampler, on_segment, kept, request.mesh, processes)
    except Interrupted as interruption:
        if not is_last:
            raise KeyboardInterrupt from None
        samples = interruption.samples
        num_draws = samples.draws.log_joint.shape[2]
        how = "" if kept is None else f"; the same call goes on from {kept.folder}"
        warn_user(f"interrupted: the posterior has {num_draws} of {request.sampler.num_samples} draws per chain{how}")
    if len(forests) == 1:
        return [samples]
    num_trees = forests[0].num_trees
    starts = range(0, num_trees * len(forests), num_trees)
    return [jax.tree.map(lambda leaf, at=start: leaf[at : at + num_trees], samples) for start in starts]


def _concatenated(*leaves: Array | np.ndarray) -> Array | np.ndarray:
    """Along the first axis; where statistics stay on the host until each device gets its own, so does their union."""
    return np.concatenate(leaves) if isinstance(leaves[0], np.ndarray) else jnp.concatenate(leaves)


def posterior_of(
    forest: Forest, samples: Samples, prior: Prior, settings: SamplerSettings, mesh: Mesh | None = None
) -> Posterior:
    """The posterior that a fit returns, from the results of its two stages."""
    posterior = Posterior(
        dictionary=forest.dictionary,
        draws=samples.draws,
        adaptation=samples.adaptation,
        shift=forest.shift,
        scale=forest.scale,
        dictionary_settings=forest.dictionary_settings,
        prior=prior,
        sampler_settings=settings,
        found=forest.found,
        noise_root=forest.noise_root,
        row_space=forest.row_space,
        features=forest.features,
        noise_deviation=forest.noise_deviation,
    )
    posterior = dataclasses.replace(posterior, lost_mass=lost_mass(forest, posterior))
    return posterior if mesh is None else posterior.replicated(mesh)

"""From an array to a posterior: stage one, then stage two."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from geode_jax._checks import check_instance, check_key, is_memory_mapped
from geode_jax._runtime.collectives import lost_processes_are_told
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._runtime.progress import part_of, progress_bar
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.fitting.local_rows import bring_rows
from geode_jax.fitting.memory import bytes_needed, warn_if_too_large
from geode_jax.fitting.row_files import checked_rows
from geode_jax.fitting.stages import CompileAhead, Request, kept_forest, posterior_of, sample_forests
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import grow_forest, plan_of
from geode_jax.forest.plan import Plan
from geode_jax.posterior.posterior import Posterior
from geode_jax.rows.files import RowFiles
from geode_jax.rows.processes import ALONE
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings


def fit(
    key: KeyArray,
    X: ArrayLike,
    *,
    dictionary: DictionarySettings | None = None,
    prior: Prior | None = None,
    sampler: SamplerSettings | None = None,
    dtype: Any = jnp.float32,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
    process_local: bool = False,
) -> Posterior:
    """Fit GEODE to the rows of X, shape (n, D), and return draws from its posterior.

    **Arguments:**

    - `key`: a JAX key; everything random in the fit follows from it.
    - `X`: an array, or a pandas or polars frame, of numbers with at least 2 different rows. NaN is a missing value:
      the posterior is conditioned on the observed values. Rows may all be partial, but every column needs an
      observed value, and every row one of a column that varies (columns that never do are left out of what is learned,
      see `Posterior.features`). No copy is kept of a memory-mapped float32 or float64 file without NaN,
      ``np.load(path, mmap_mode="r")``. Or the path of such a ``.npy`` file, or of a ``.parquet`` file (its rows are
      first written to a temporary file, in TMPDIR), or a list of paths: their rows one after the other.
    - `dictionary`: settings of stage one; None is ``DictionarySettings()``.
    - `prior`: hyperparameters of the model; None is ``Prior()``.
    - `sampler`: settings of stage two; None is ``SamplerSettings()``.
    - `dtype`: float32 (default) or float64, for the dictionary and the sampler, whatever JAX's global setting.
    - `progress`: show a progress bar on standard error.
    - `checkpoint`: a folder for the unfinished fit, created if needed. The state is saved there after stage one and
      after every segment of the sampler; the same call after a crash resumes from it, and gives on a CPU the same draws
      bit for bit. The folder is not deleted: do so when the posterior is saved.
    - `mesh`: the devices that share the sampler's work, a `jax.sharding.Mesh` with axes among ``trees``, ``chains`` and
      ``rows``. The first two have sizes that divide `num_trees` and `num_chains`. None is JAX's default device. Draws
      are those of one device up to the order of sums (with a threefry key, as `jax.random.key` makes by default: with
      an ``rbg`` key JAX draws for many chains at once otherwise than for few). Each device gets only its own part of
      what the sampler needs of the rows, straight from the host. The devices also share the rows of predictions
      (:meth:`geode_jax.Posterior.replicated`). Where they belong to several processes (`jax.distributed`), each makes
      the same call on the same data, and gets the same posterior, on its own devices.
    - `process_local`: X holds only the rows of this process, any number of them, none included; each process passes its
      own, as to `jax.make_array_from_process_local_data`. Rows are numbered process by process, in the order of the
      processes along the axis ``rows`` of the mesh; each must have devices of its own there. Processes exchange sums
      over their rows, and some rows: those that trees are learned from (``DictionarySettings.tree_rows``), samples of
      a few thousand, and cells with fewer rows than features. The posterior is that of one process with all rows, up to
      the order of sums (with a threefry key, as `jax.random.key` makes by default; cells of more than 1500 rows and
      features are decomposed by another randomised method). Rows must be complete, and in all processes together more
      than half as many as features; machines and versions must be alike. All processes give a `checkpoint` or none; the
      folder may be shared. Ctrl-C must reach every process, and draws made so far are not returned.

    Interrupted by Ctrl-C after warm-up, it returns the draws made so far, with a RuntimeWarning.

    Raises TypeError or ValueError naming the argument, and FloatingPointError if sampling became non-finite.
    """
    request = Request.checked(
        dictionary=dictionary,
        prior=prior,
        sampler=sampler,
        dtype=dtype,
        progress=progress,
        checkpoint=checkpoint,
        mesh=mesh,
        process_local=process_local,
    )
    return fit_forest(key, X, request)[1]


def fit_forest(key: KeyArray, X: ArrayLike, request: Request) -> tuple[Forest, Posterior]:
    """As :func:`fit`, for callers that need the forest too."""
    key = check_key(key)
    processes = ALONE
    if request.process_local:
        with lost_processes_are_told(request.mesh):
            data, processes, devices = bring_rows(X, request.mesh, key, request.compared)
    else:
        data = checked_rows(X, min_rows=2, allow_nan=True)
    if processes.is_alone:
        plan = plan_of(data, request.dictionary).on_mesh(request.row_devices)
    else:
        plan = Plan.of(request.dictionary, sum(processes.sizes), data.shape[1])
        plan = plan.among(processes.sizes, devices, processes.index)
    if plan.num_partial > 0:
        request.check_missing()
    files = data.files if isinstance(data, RowFiles) else (data,)
    # an empty file cannot be mapped
    is_mapped = any(is_memory_mapped(file) for file in files) and plan.num_partial == 0
    needed = bytes_needed(plan, request.sampler, request.dtype.itemsize, num_rows=len(data), is_mapped=is_mapped)
    warn_if_too_large(needed)
    with (
        lost_processes_are_told(request.mesh),
        jax_settings(request.dtype),
        request.open_checkpoint(key, list(files)) as kept,
        progress_bar(request.progress) as show,
    ):
        if kept is not None and not processes.is_alone:
            kept = kept.of_process(processes, [*processes.sizes, *devices])
        key_forest, key_sample = jax.random.split(key)
        # one bar for both stages: the first tenth is stage one
        learn = part_of(show, 0.0, 0.1)
        ahead = CompileAhead(key_sample, request)
        on_shapes = ahead.start if request.mesh is None else None
        grow = partial(grow_forest, key_forest, data, plan, request.dtype, learn, on_shapes, processes)
        forest = kept_forest(kept, grow, request.mesh, processes)
        ahead.wait()
        show_sampling = part_of(show, 0.1, 1.0)
        (samples,) = sample_forests(key_sample, [forest], request, show_sampling, kept, processes=processes)
        return forest, posterior_of(forest, samples, request.prior, request.sampler, mesh=request.mesh)


def sample_posterior(
    key: KeyArray,
    forest: Forest,
    *,
    prior: Prior | None = None,
    sampler: SamplerSettings | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
) -> Posterior:
    """Draw from the posterior given a learned forest: stage two of :func:`fit`, with the same arguments and errors."""
    key = check_key(key)
    check_instance(forest, "forest", Forest)
    request = Request.for_trees(
        forest.num_trees,
        dictionary=forest.dictionary_settings,
        prior=prior,
        sampler=sampler,
        dtype=forest.dtype,
        progress=progress,
        checkpoint=checkpoint,
        mesh=mesh,
    )
    if forest.partial is not None:
        request.check_missing()
    # all arrays: of one varying feature, for example, residuals and bases are the same for any rows
    arrays = [] if checkpoint is None else [array for _, array in sorted(forest.to_archive()[1].items())]
    with (
        jax_settings(forest.dtype),
        request.open_checkpoint(key, arrays) as kept,
        progress_bar(progress) as show,
    ):
        (samples,) = sample_forests(key, [forest], request, show, kept)
        return posterior_of(forest, samples, request.prior, request.sampler, mesh=request.mesh)

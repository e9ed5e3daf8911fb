"""Shared set-up: runtime shape checks, one compilation cache, one small problem that every sampler test shares."""

import contextlib
import dataclasses
import gc
import itertools
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import jaxlib.version

# Several devices for the tests of meshes; all others run on the first. Without XLA's fusion emitters the tests' small
# programs compile in two thirds of the time and run as fast. Users keep them: large programs run faster with them.
# A program compiled in one piece takes a sixth less work than in pieces for several cores, which all have tests to run.
_flags = ["--xla_force_host_platform_device_count=4", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA ends the process at a flag that it does not know, and later versions do not know this one.
_flags += ["--xla_cpu_use_fusion_emitters=false"] if jaxlib.version.__version_info__ < (0, 11) else []
# Without LLVM's costly passes, in the default run and among the longer proofs alike, so that both share what they
# compile: most programs are used a few times each. Simulations that run for long have these passes
# (`small.OPTIMISED`). Processes that tests start are compiled in the same way, so that they draw the same. The demo of
# `.ci/run` and full benchmarks are compiled as users' programs are.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# more threads of XLA than devices, which could otherwise wait for each other in LAPACK (_runtime/devices.py)
os.environ["NPROC"] = "8"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags])

# Workers, and processes that tests start, share what they have compiled.
_cache = Path(os.environ.get("GEODE_JAX_TEST_CACHE", Path(__file__).parent.parent / ".jax_cache"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Every worker has one core: threads of BLAS or OpenMP beside its own would wait for those of the other workers.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Traces are many small objects that live long: Python would look through all of them again and again.
gc.set_threshold(50_000, 50, 100)

# ArviZ 0.23 writes a file when it is first imported on a day, which fails where two workers do so at once. So the
# process that starts the workers is the first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
        import arviz  # noqa: F401

import jax  # noqa: E402  (after the flags)
import numpy as np  # noqa: E402  (after the flags)
import pytest  # noqa: E402  (after the flags)
from jaxtyping import install_import_hook  # noqa: E402  (after the flags)

# Annotated shapes are enforced in the tests and cost users nothing: in every module that has them but those where
# users' arguments come in, which have checks of their own, whose messages the tests read. Modules without shapes are
# left to mypy: the hook wraps a function within a function anew in every call, and stage one has many such calls. It
# took half of the time of a small fit.
_PACKAGE = Path(__file__).parent.parent / "geode_jax"
_BOUNDARY = ("_checks", "cli", "demo", "diagnostics", "estimators", "fitting", "interop", "settings", "truncation")
_BOUNDARY += ("_files.checkpoint", "forest.learn", "posterior", "predict.api", "predict.classes", "predict.conditional")
_BOUNDARY += ("predict.dimension", "predict.held_out", "predict.rows")
_HAS_SHAPES = re.compile(r"\b(Bool|Float|Int|Shaped)\[")
_SHAPED = [path for path in sorted(_PACKAGE.rglob("*.py")) if _HAS_SHAPES.search(path.read_text())]
_MODULES = [".".join(path.relative_to(_PACKAGE).with_suffix("").parts) for path in _SHAPED]
_CHECKED = [name for name in _MODULES if not f"{name}.".startswith(tuple(f"{it}." for it in _BOUNDARY))]
install_import_hook([f"geode_jax.{name}" for name in _CHECKED], "beartype.beartype")

from geode_jax import DictionarySettings, SamplerSettings, fit  # noqa: E402  (after the hook)


@pytest.fixture(scope="session")
def data():
    """Two noisy curved bands in six dimensions, 90 rows, in units far from 1."""
    rng = np.random.default_rng(0)
    t = rng.uniform(-1, 1, 90)
    side = rng.integers(0, 2, 90)
    latent = np.stack([t, t**2 + 1.5 * side, 0.3 * rng.normal(size=90)], axis=1)
    return 40.0 + 7.0 * (latent @ rng.normal(size=(3, 6)) + 0.15 * rng.normal(size=(90, 6)))


# Files whose tests take longest, of the default run or of the longer proofs. They go first, so that no worker is left
# with one of them at the end.
_LONGEST = ("docs", "benchmarks", "sklearn_checks", "sampler_joint", "wide", "fit", "sampler_draws", "noise_covariance")
_LONGEST += ("devices", "processes", "constant_features", "sampler_calibration", "sampler_nuts", "stage_one", "cli")


def pytest_collection_modifyitems(items):
    place = {f"test_{name}.py": number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


DICTIONARY = DictionarySettings(num_trees=2, max_rank=3, depth=2, min_cell_size=10, noise_covariance=None)
SAMPLER = SamplerSettings(num_warmup=40, num_samples=30, num_chains=2, segment_length=10)
# Estimators with these options share one compiled sampler where they are fitted to 65 to 128 complete rows.
QUICK = {"num_trees": 1, "max_rank": 3, "depth": 2, "num_warmup": 10, "num_samples": 10, "random_state": 0}


_SLOW_FLOAT64 = pytest.param("float64", marks=pytest.mark.slow)
# Kinds of `posterior` for tests that ask for noise of any shape, in the default run or among the longer proofs.
ANY_NOISE = pytest.mark.parametrize("posterior", ["float32", "shaped", _SLOW_FLOAT64], indirect=True)
ANY_NOISE_SLOW = pytest.mark.parametrize(
    "posterior", ["float32", pytest.param("shaped", marks=pytest.mark.slow), _SLOW_FLOAT64], indirect=True
)


@pytest.fixture(scope="session", params=["float32", _SLOW_FLOAT64])
def posterior(request, data):
    """One small fit per type: two trees, two chains. "shaped" has noise that is not isotropic, in float32."""
    if request.param != "shaped":
        return fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER, dtype=request.param)
    axes = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    root = (axes * np.exp(np.linspace(-0.6, 0.6, 6))) @ axes.T
    plain = dataclasses.replace(DICTIONARY, feature_noise=None)  # one scale, which commutes with the root
    found = fit(jax.random.key(0), (data - 40.0) @ np.linalg.inv(root), dictionary=plain, sampler=SAMPLER)
    return dataclasses.replace(found, shift=40.0 + found.shift @ root, noise_root=root)


_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_compiled_programs():
    """Drop compiled programs before there are too many.

    Every one holds memory mappings, of which Linux allows a process 65,530 by default; XLA crashes at the limit. They
    are counted after every tenth test, as to read 20,000 takes some 30 milliseconds.
    """
    yield
    mappings = Path("/proc/self/maps")
    if next(_tests_run) % 10 == 0 and mappings.exists() and mappings.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture
def fresh_programs():
    """For tests that trace programs with other constants than the package's own."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def run_two_processes(script: str, *rest: object) -> list[tuple[int, str, str]]:
    """Return codes, outputs and errors of two processes that run a script with a port, their numbers, and `rest`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(port), str(number), *map(str, rest)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    told = [process.communicate(timeout=300) for process in both]
    return [(process.returncode, *own) for process, own in zip(both, told, strict=True)]

"""What every benchmark shares: finding data, timing, and writing results with what they depend on."""

import importlib.util
import json
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from joblib import cpu_count
from threadpoolctl import threadpool_limits

import geode_jax

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Small fits of quick runs. Those of one chain to 65 to 128 complete rows share one compiled sampler.
QUICK_SIZE = {"max_rank": 3, "depth": 2}
QUICK_DICTIONARY = {"num_trees": 1, **QUICK_SIZE}
QUICK_SWEEPS = {"num_warmup": 20, "num_samples": 20}
_PACKAGES = ("geode-jax", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "equinox", "pymetis", "pynndescent")


def find_data(name: str, folder: str | None = None) -> Path:
    """Path of a data file: in `folder`, then $GEODE_JAX_DATA, then shared/data beside the checkout."""
    places = [Path(place) for place in (folder, os.environ.get("GEODE_JAX_DATA")) if place]
    places.append(ROOT.parent / "shared" / "data")
    for place in places:
        if (place / name).exists():
            return place / name
    looked = ", ".join(map(str, places))
    raise SystemExit(
        f"{name} not found in {looked}. It is not ours to redistribute; put it in a folder and name the folder with"
        " --data or GEODE_JAX_DATA. Frey faces: (1965, 28, 20) uint8 as `images` in frey_faces.npz, from Roweis, Saul &"
        " Hinton 2002."
    )


def load_frey(folder: str | None = None) -> np.ndarray:
    """Frey faces as (1965, 560) float64 on their 0..255 scale."""
    with np.load(find_data("frey_faces.npz", folder), allow_pickle=False) as file:
        return file["images"].reshape(1965, 560).astype(np.float64)


def load_mnist(folder: str | None, num_rows: int) -> np.ndarray:
    """Training images in random order with uniform noise on their pixels, (num_rows, 784) float32 on 0..256."""
    with np.load(find_data("mnist.npz", folder), allow_pickle=False) as file:
        images = file["x_train"].reshape(-1, 784)
    rng = np.random.default_rng(0)
    chosen = images[rng.permutation(len(images))[:num_rows]]
    return (chosen + rng.random(chosen.shape)).astype(np.float32)


def is_installed(package: str) -> bool:
    """Whether a rival that is no dependency is at hand: `pip install '.[rivals]'`."""
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"{package} is not installed: left out")
    return found


def blas_on_all_cores() -> threadpool_limits:
    """A context in which BLAS has a thread for every core that the process may use: more would wait for each other."""
    return threadpool_limits(cpu_count())


def coverage(posterior: geode_jax.Posterior, test: np.ndarray) -> float:
    """Share of hidden coordinates inside their 95% intervals."""
    hidden = np.random.default_rng(1).random(test.shape) < 0.5
    filled = geode_jax.impute(posterior, np.where(hidden, np.nan, test))
    return float(np.mean(((filled.lower <= test) & (test <= filled.upper))[hidden]))


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Record the wall time of a block in seconds under `name`."""
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start


def clocked(times: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the seconds of its call recorded under `name`."""

    def call(*arguments: Any, **options: Any) -> Any:
        with timed(times, name):
            return function(*arguments, **options)

    return call


def gain_of(ours: list[float], others: list[float]) -> dict[str, float]:
    """Mean difference split by split, and its standard error, which takes splits as independent."""
    gain = np.subtract(ours, others)
    return {"gain": float(gain.mean()), "gain_se": float(gain.std(ddof=1) / np.sqrt(gain.size))}


def memory_bytes(field: str) -> int:
    """What /proc tells of this process's memory: RssAnon, VmHWM, ... Linux only."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from a new process, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def best_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call that JAX runs, after one that may compile: the best of five, or of as many as fit in a second.

    Other work on the machine only ever adds to it.
    """
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < 5 or sum(times) < 1.0:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def earlier_rows(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that an earlier run with the same settings has written: long experiments go on where the last one ended."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    return earlier["rows"] if earlier["settings"] == settings else []


def _module() -> str:
    """What `python -m` was given."""
    name = Path(sys.argv[0]).stem
    return "benchmarks" if name == "__main__" else f"benchmarks.{name}"


def write_result(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write rows of numbers with versions, machine and settings to benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "name": name,
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "settings": settings,
        "versions": {package: metadata.version(package) for package in _PACKAGES},
        "machine": {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "device": str(jax.devices()[0]),
        },
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")
    return path

"""What a GPU would be given: the package's programs compiled for an H100 on a machine without one.

For every program: the time to compile it (without autotuning), kernels of a sweep or of a block of rows, loops in one
whose length the compiler does not know (each round waits for the host), and temporary memory beside its arguments. The
time of launches is LAUNCH_SECONDS for every kernel; XLA may join several into one CUDA graph, which costs less, and a
loop of unknown length counts as one round, which costs more. Beside it stands what reading a sweep's statistics takes
at the card's bandwidth. Both times are estimates; nothing is run.

Needs NVIDIA's compiler and JAX's plugin of the same version as jaxlib, in a folder of their own (570 MB), which
GEODE_JAX_CUDA names:

pip install --no-deps --target FOLDER jax-cuda12-plugin==X jax-cuda12-pjrt==X nvidia-cuda-nvcc-cu12
GEODE_JAX_CUDA=FOLDER python -m benchmarks.gpu_compile [--quick] [--programs NAME ...]
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import ROOT, write_result
from benchmarks.tables import load, table
from geode_jax.forest.device_candidates import _best_nodes
from geode_jax.forest.device_products import _moments
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import _forest_of_shapes, learn_forest
from geode_jax.forest.plan import Plan
from geode_jax.gibbs import run
from geode_jax.math.rows_in_space import Space, observe_in_space
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.draw import Draw
from geode_jax.partition.metis import Partition
from geode_jax.predict.conditional_moments import conditional_summary, tails
from geode_jax.predict.nodes import Nodes
from geode_jax.predict.rows import CANDIDATES, num_seen, num_wanted, observe_rows
from geode_jax.settings import DictionarySettings, Prior, RankAdaptation, SamplerSettings

FOLDER = "GEODE_JAX_CUDA"
TARGET = Path(__file__).with_name("h100.txtpb")  # the card, as XLA describes it
LAUNCH_SECONDS, BYTES_PER_SECOND = 4e-6, 3e12
LONGEST = 600  # seconds for a program, after which it is given up
NUM_SWEEPS = 50

Shapes = tuple[Any, ...]


class Program(NamedTuple):
    """A function to compile, the shapes it is called with, and the bytes that a sweep must read.

    `num_sweeps`: sweeps of a call, 0 if it has none. `is_double`: whether it computes in float64.
    """

    function: Callable[..., Any]
    shapes: Shapes
    bytes_read: int
    num_sweeps: int
    is_double: bool = False


def sampler(num_rows: int, num_features: int, num_trees: int, depth: int, max_rank: int) -> Program:
    """A segment of sweeps over complete rows, as `fit` runs it, with as many candidates as it would choose."""
    forest = forest_of_shapes(num_rows, num_features, num_trees, depth, max_rank)
    return segment(forest)


def forest_of_shapes(num_rows: int, num_features: int, num_trees: int, depth: int, max_rank: int) -> Forest:
    """What stage one would give, with shapes in place of arrays."""
    settings = DictionarySettings(num_trees=num_trees, depth=depth, max_rank=max_rank)
    plan = Plan.of(settings, num_rows, num_features)
    cells = tuple(np.arange(1) for _ in range(plan.num_nodes))
    return _forest_of_shapes([Partition(depth, cells)] * num_trees, max_rank, plan, np.dtype(np.float32))


def partial_rows() -> Program:
    """A segment over 300 rows of 20 features, a tenth of the values missing: two trees, rank 5."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) @ rng.normal(size=(3, 20)) + 0.1 * rng.normal(size=(300, 20))
    x[rng.random(x.shape) < 0.1] = np.nan
    settings = DictionarySettings(num_trees=2, depth=2, max_rank=5)
    forest = learn_forest(jax.random.key(0), x, dictionary=settings)
    return segment(forest)


def segment(forest: Forest) -> Program:
    """NUM_SWEEPS sweeps of one chain per tree; keys enter as raw data, which devices can be given."""
    problem = jax.eval_shape(lambda it: it.problem(Prior(), SamplerSettings()), forest)
    raw = jax.ShapeDtypeStruct((problem.statistics.residual.shape[0], 1, 2), np.uint32)
    options = run.SegmentOptions(NUM_SWEEPS, RankAdaptation())

    def sweeps(raw: Any, chains: Any, problem: Any, first: Any, num_warmup: Any) -> Any:
        keys = jax.random.wrap_key_data(raw)
        return run._segment.__wrapped__(keys, chains, problem, first, num_warmup, options=options)

    def start(raw: Any, problem: Any) -> Any:
        return run._start.__wrapped__(jax.random.wrap_key_data(raw), problem)

    chains, number = jax.eval_shape(start, raw, problem), jax.ShapeDtypeStruct((), np.int32)
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(problem.statistics))
    return Program(sweeps, (raw, chains, problem, number, number), read, NUM_SWEEPS)


def filling(num_rows: int, num_features: int, max_rank: int, in_space: int | None = None) -> Program:
    """Means and 95% intervals of rows each of which misses other features: 8 trees of depth 5 with 8 draws each.

    `in_space`: dimension of the space that all nodes are in, where they are in coordinates of one.
    """
    forest = forest_of_shapes(1000, num_features, 8, 5, max_rank)
    sampler_of = segment(forest)
    drawn: Draw = jax.eval_shape(sampler_of.function, *sampler_of.shapes)[1]
    draws = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], 8, *leaf.shape[3:]), leaf.dtype), drawn)
    mask = np.random.default_rng(0).random((num_rows, num_features)) < 0.5
    places, most_missing = num_seen(mask.astype(np.float32)), num_wanted(mask, None)
    rows = jax.ShapeDtypeStruct(mask.shape, np.float32)
    dictionary = forest.dictionary
    if in_space is None:
        seen: Any = jax.eval_shape(lambda x, shown: observe_rows(x, shown, None, num_seen=places), rows, rows)
    else:
        space = Space(jax.ShapeDtypeStruct((num_features, in_space), np.float32))
        seen = jax.eval_shape(lambda *given: observe_in_space(*given, num_seen=places), rows, rows, space)
        shapes = (*dictionary.centres.shape[:2], in_space + 1), (*dictionary.bases.shape[:2], in_space + 1, max_rank)
        centres, bases = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
        dictionary = Dictionary(dictionary.tree, centres, bases, dictionary.ranks, num_features - in_space - 1)

    def summary(nodes: Any, draws: Any, seen: Any) -> Any:
        levels = jnp.asarray(tails((0.025, 0.975)), np.float32)
        options = {"num_candidates": CANDIDATES, "num_wanted": most_missing}
        return conditional_summary(nodes, draws, None, levels, seen, **options)

    return Program(summary, (Nodes(dictionary, None), draws, seen), 0, 0)


def moments(num_rows: int, num_features: int) -> Program:
    """Mean and scatter of a block of rows, in stage one."""
    rows = jax.ShapeDtypeStruct((num_rows, num_features), np.float32)
    return Program(_moments.__wrapped__, (rows, jax.ShapeDtypeStruct((), np.int32)), 0, 0, is_double=True)


def candidate_search(num_rows: int, num_features: int, num_nodes: int, rank: int) -> Program:
    """The 16 best nodes of a block of rows, in stage one."""
    shapes = (num_nodes, num_features), (num_nodes, num_features, rank), (num_nodes,), (num_nodes,), (num_nodes, rank)
    nodes = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    rows = jax.ShapeDtypeStruct((num_rows, num_features), np.float32)
    return Program(functools.partial(_best_nodes.__wrapped__, width=16), (nodes, rows), 0, 0)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "6000 rows, 1 tree of 63 nodes, rank 20": lambda: sampler(6000, 100, 1, 5, 20),
    "60,000 rows, 8 trees of 63 nodes, rank 20": lambda: sampler(60_000, 100, 8, 5, 20),
    "a million rows, 8 trees of 127 nodes, rank 20": lambda: sampler(1_000_000, 100, 8, 6, 20),
    "300 rows with missing values, 2 trees, rank 5": partial_rows,
    "filling in 512 rows, D = 560, rank 100, 8 trees": lambda: filling(512, 560, 100),
    "filling in 8 rows, D = 100,000, rank 60, 8 trees": lambda: filling(8, 100_000, 60, 999),
    "stage one: moments of 32,768 rows, D = 100": lambda: moments(32_768, 100),
    "stage one: candidates of 8192 rows, D = 100, 127 nodes": lambda: candidate_search(8192, 100, 127, 20),
}
QUICK: dict[str, Callable[[], Program]] = {"200 rows": lambda: sampler(200, 10, 1, 2, 3)}


class Count(NamedTuple):
    """Kernels of a computation, those of a loop times its rounds where these are known; and loops of unknown length.

    `sweep`, `sweep_loops`: the same of one round of the loop over sweeps; 0 if there is none.
    """

    kernels: int
    unknown_loops: int
    sweep: int
    sweep_loops: int


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\(")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "add-dependency"),
}


def count_kernels(text: str, num_rounds: int = 0) -> Count:
    """Kernels of a compiled module, from its text. A loop of `num_rounds` is the one over sweeps."""
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = ""
        elif current and _LINE.match(line):
            computations[current].append(line)

    def count(name: str) -> Count:
        kernels = unknown = sweep = sweep_loops = 0
        for line in computations[name]:
            found = _LINE.match(line)
            operation = found[1] if found else ""
            if operation in _FREE or operation.endswith(("-done", "-update")):
                continue
            if operation == "while":
                body = count(re.search(r"body=%?([\w.\-]+)", line)[1])  # type: ignore[index]
                found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                rounds = int(found[1]) if found else 1
                kernels += body.kernels * rounds
                unknown += body.unknown_loops + (found is None)
                is_sweep = rounds == num_rounds
                sweep = max(sweep, body.kernels if is_sweep else body.sweep)
                sweep_loops = max(sweep_loops, body.unknown_loops if is_sweep else body.sweep_loops)
            elif operation in ("call", "conditional", "async-start", "call-start"):
                names = re.findall(r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
                names += re.findall(r"%([\w.\-]+)", "".join(re.findall(r"branch_computations=\{(.*?)\}", line)))
                # of a conditional, the branch with the most kernels
                part = max(map(count, names))
                kernels, unknown = kernels + part.kernels, unknown + part.unknown_loops
                sweep, sweep_loops = max(sweep, part.sweep), max(sweep_loops, part.sweep_loops)
            else:
                kernels += 1
        return Count(kernels, unknown, sweep, sweep_loops)

    return count(entry)


def compile_for_h100(program: Program) -> tuple[Any, float]:
    """The compiled program, and the seconds that took. Only in a process with the environment of :func:`worker`."""
    from jax._src.lib import xla_client
    from jax.experimental.topologies import TopologyDescription
    from jaxlib import _jax

    jax.devices()  # JAX now finds the plugin and tells XLA of its libraries, though it does not use it
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    # jax.experimental.topologies asks the backend, and there is none without a GPU
    described = {"target_config": TARGET.read_text(), "topology": "1x1x1"}
    topology = _jax.get_default_c_api_topology("cuda", "h100", described)
    card = TopologyDescription(topology._make_compile_only_devices())
    mesh = jax.sharding.Mesh(np.array(card.devices[:1]), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.enable_x64(program.is_double):
        lowered = jax.jit(program.function, in_shardings=whole, out_shardings=whole).lower(*program.shapes)
    start = time.perf_counter()
    compiled = lowered.compile()
    return compiled, time.perf_counter() - start


def measure(name: str, program: Program) -> dict[str, Any]:
    compiled, seconds = compile_for_h100(program)
    found = count_kernels(compiled.as_text(), program.num_sweeps)
    kernels = found.sweep if program.num_sweeps else found.kernels
    if kernels == 0:
        raise RuntimeError(f"{name}: no kernels were found in the compiled program's text")
    row = {
        "program": name,
        "compile seconds": seconds,
        "kernels": kernels,
        "loops of unknown length": found.sweep_loops if program.num_sweeps else found.unknown_loops,
        "such loops before": found.unknown_loops - found.sweep_loops if program.num_sweeps else 0,
        "temporary mebibytes": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "launches ms": 1e3 * LAUNCH_SECONDS * kernels,
    }
    return {**row, "reading ms": 1e3 * program.bytes_read / BYTES_PER_SECOND} if program.num_sweeps else row


def worker(name: str, folder: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own: XLA's flags are read once, and what does not end can be ended."""
    compiler = Path(folder) / "nvidia" / "cuda_nvcc"
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={compiler}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PATH": f"{compiler / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    command = [sys.executable, "-m", "benchmarks.gpu_compile", "--worker", name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return {"program": name}
    if done.returncode != 0:
        raise RuntimeError(f"{name}: the compiler ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tables() -> list[str]:
    record = load("gpu_compile")
    columns = {
        "compile seconds": ".1f",
        "kernels": ",",
        "loops of unknown length": "",
        "such loops before": "",
        "temporary mebibytes": ",.0f",
        "launches ms": ".2f",
        "reading ms": ".3f",
    }
    rows = [
        [row["program"], *(format(row[name], style) if name in row else "" for name, style in columns.items())]
        for row in record["rows"]
    ]
    return [
        "### What a GPU would be given",
        "",
        "Programs compiled for an H100 on a machine without one, without autotuning; one that took more than"
        f" {LONGEST} seconds has no numbers. Kernels and loops are those of a sweep, or of a block of rows (filled in,"
        " or in stage one), with one round of loops of unknown length; some such loops come before the sweeps of a"
        " segment, once. Temporary memory is beside the arguments. Two estimates: launches, if each took"
        f" {1e6 * LAUNCH_SECONDS:.0f} microseconds (XLA may join several), and reading a sweep's statistics at"
        f" {BYTES_PER_SECOND / 1e12:.0f} TB/s.",
        "",
        *table(["program", *columns], rows),
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, metavar="NAME", help="only these; none is written")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(measure(options.worker, {**PROGRAMS, **QUICK}[options.worker]())))
        return []
    folder = os.environ.get(FOLDER)
    if folder is None:
        raise SystemExit(f"{FOLDER} does not name the folder of JAX's CUDA plugin; the head of {__file__} says how")
    rows: list[dict[str, Any]] = []
    for name in options.programs or (QUICK if options.quick else PROGRAMS):
        rows.append(worker(name, folder))
        print(rows[-1], flush=True)
    if not (options.quick or options.programs):
        write_result("gpu_compile", {}, rows)
    return rows


if __name__ == "__main__":
    main()

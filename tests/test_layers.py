"""A reader can tell from a path what a file may import."""

import ast
import builtins
import dis
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "geode_jax"

# Every module's layer; a module imports only from lower layers of the package, or its own folder's earlier files.
LAYERS = {
    "_typing": 0,
    "_checks": 0.5,
    "compilation": 0.5,
    "settings": 1,
    "truncation": 1.5,
    "storage": 1.5,
    "memory": 1.5,
    "checkpoint": 1.6,
    "math.log_concave": 2,
    "math.truncated": 2.1,
    "math.conjugate": 2.2,
    "math.lowrank": 2,
    "math.seen": 2.1,
    "math.streaming": 2,
    "build.blocks": 1.9,
    "build.heap": 1.9,
    "build.rows": 1.95,
    "build.standardise": 2,
    "build.neighbours": 2,
    "build.partition": 2,
    "build.parallel": 2,
    "build.row_space": 2,
    "build.subspace": 2.1,
    "build.fill": 2.2,
    "build.noise": 2.3,
    "build.evidence": 2.2,
    "build.completed": 2.2,
    "build.shape": 2.4,
    "build.units": 2.4,
    "build.span": 2.3,
    "build.candidates": 2.3,
    "build.reduction": 2.3,
    "tree": 3,
    "dictionary": 4,
    "statistics": 5,
    "candidates": 5.2,
    "partial_rows": 5.5,
    "state": 6,
    "model": 7,
    "gibbs.allocation": 8,
    "gibbs.weights": 8,
    "gibbs.scales": 8,
    "gibbs.shrinkage": 8,
    "gibbs.noise": 8,
    "gibbs.rank": 8,
    "gibbs.missing": 8,
    "gibbs.sweep": 9,
    "gibbs.chain": 9.5,
    "gibbs.placement": 9.7,
    "gibbs.run": 10,
    "learn": 9.8,
    "completion": 9.9,
    "handover": 9.95,
    "forest": 10,
    "grow": 10.1,
    "posterior": 11,
    "class_posterior": 11.5,
    "fit": 12.2,
    "predict.density": 12,
    "predict.draw": 12,
    "predict.partial": 12,
    "predict.impute": 12.1,
    "predict.boundary": 12.1,
    "predict.conditional": 12.2,
    "predict.conformal": 12.2,
    "predict.predictive": 12.3,
    "predict.dimension": 12.2,
    "predict.held_out": 12.1,
    "predict.reduced": 12.1,
    "predict.classes": 12.2,
    "calibration": 12.4,
    "fit_classes": 12.5,
    "diagnostics": 13,
    "estimators.base": 13,
    "estimators.density": 13.1,
    "estimators.imputer": 13.1,
    "estimators.regressor": 13.1,
    "estimators.classifier": 13.1,
    "interop.plots": 14,
    "interop.numpyro": 14,
    "interop.arviz": 14,
    "demo.baselines": 14,
    "demo.digits": 15,
    "cli.tables": 15,
    "cli.commands": 16,
    "__main__": 17,
}
STAGE_ONE_FORBIDS = {"jax", "jaxlib", "equinox", "numpyro"}
STAGE_TWO_FORBIDS = {"scipy", "sklearn", "pymetis", "pynndescent"}
STAGE_TWO = ("gibbs.", "math.", "tree", "statistics", "state", "model")
# Optional or slow to import: only where it is used.
LAZY = {
    "pynndescent": {"build.neighbours"},
    "matplotlib.figure": {"demo.digits"},
    "geode_jax.interop.plots": {"demo.digits"},
    "pyarrow": {"cli.tables"},
    "pyarrow.parquet": {"cli.tables"},
}


def _modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, path


def _imports(path):
    """(imported module, whether inside a function) of every import statement."""
    tree = ast.parse(path.read_text())
    inner = {id(node) for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module
            for alias in node.names:
                is_module = (ROOT.parent / Path(*module.split(".")) / f"{alias.name}.py").exists()
                yield (f"{module}.{alias.name}" if is_module else module), id(node) in inner


@pytest.mark.parametrize(("name", "path"), list(_modules()), ids=[name for name, _ in _modules()])
def test_imports_point_down(name, path):
    assert name in LAYERS, "give the new module a layer"
    for imported, is_inner in _imports(path):
        top = imported.split(".")[0]
        if is_inner:
            assert name in LAZY.get(imported, ()), f"{imported} is imported inside a function"
        if top == "geode_jax":
            assert imported != "geode_jax", "import the module that defines a name"
            assert LAYERS[imported.removeprefix("geode_jax.")] < LAYERS[name], f"{name} imports {imported}"
        if name.startswith("build."):
            assert top not in STAGE_ONE_FORBIDS
        if name.startswith(STAGE_TWO):
            assert top not in STAGE_TWO_FORBIDS


def _globals_read(code):
    """Names that a code object and those inside it look up outside of all functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_read(constant)


@pytest.mark.parametrize(("name", "path"), list(_modules()), ids=[name for name, _ in _modules()])
def test_names_exist(name, path):
    """What linters would say, if shapes in annotations did not look like names to them."""
    code = compile(path.read_text(), str(path), "exec")
    stored = {
        node.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    module = importlib.import_module(f"geode_jax.{name}")
    missing = set(_globals_read(code)) - stored - set(vars(module)) - set(vars(builtins))
    assert missing <= {"__name__", "__qualname__", "__module__", "__annotations__"}, f"{name}: {missing}"


def test_inner_packages_are_empty():
    for path in ROOT.rglob("__init__.py"):
        if path.parent != ROOT:
            assert not path.read_text()


def test_import_has_no_side_effects():
    """Importing the package starts no backend, makes no array, changes no JAX setting, and imports nothing slow."""
    code = (
        "import jax; before = dict(jax.config.values);"
        "import geode_jax, sys;"
        "assert dict(jax.config.values) == before;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends;"
        "assert not {'pynndescent', 'numba', 'matplotlib', 'numpyro'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)

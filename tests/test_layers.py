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

# The layer of every folder, and of the modules beside them. A module imports from lower layers, and from modules of its
# own folder that do not lead back to it.
LAYERS = {
    "_typing": 0,
    "_version": 0,
    "_checks": 1,
    "_runtime": 1,
    "rows": 2,
    "settings": 2,
    "_files": 3,
    "math": 3,
    "partition": 3,
    "truncation": 3,
    "learning": 4,
    "model": 5,
    "forest": 6,
    "gibbs": 6,
    "posterior": 6,
    "predict": 7,
    "fitting": 8,
    "diagnostics": 8,
    "estimators": 9,
    "interop": 9,
    "demo": 10,
    "cli": 11,
    "__main__": 12,
}
# What a folder must not reach, by whatever path.
UNREACHABLE = {
    "rows": {"jax", "jaxlib", "equinox", "numpyro"},
    "partition": {"jax", "jaxlib", "equinox", "numpyro"},
    "learning": {"jax", "jaxlib", "equinox", "numpyro"},
    "model": {"pymetis", "pynndescent", "sklearn", "joblib"},
    "gibbs": {"pymetis", "pynndescent", "sklearn", "joblib"},
}
# What it must not import itself.
FORBIDDEN = {"math": {"scipy"}, "model": {"scipy"}, "gibbs": {"scipy"}}
# Optional or slow to import: only where it is used.
LAZY = {
    "pynndescent": {"partition.neighbours"},
    "matplotlib.figure": {"demo.digits"},
    "geode_jax.interop.plots": {"demo.digits"},
    "pyarrow": {"cli.tables"},
    "pyarrow.parquet": {"_files.parquet"},
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


IMPORTS = {name: list(_imports(path)) for name, path in _modules()}


def _folder(name):
    return name.split(".")[0]


def _reached(name, imports):
    """Modules of the package, and packages beside it, that importing a module leads to."""
    found, open_ones = set(), [name]
    while open_ones:
        for imported, _ in imports[open_ones.pop()]:
            own = imported.removeprefix("geode_jax.")
            target = own if own in imports else imported.split(".")[0]
            if target not in found:
                found.add(target)
                open_ones += [target] if target in imports else []
    return found


def _problems(name, imports):
    """What is wrong with the imports of a module, in words."""
    folder, found = _folder(name), []
    if folder not in LAYERS:
        return [f"{name}: give the folder a layer"]
    for imported, is_inner in imports[name]:
        if is_inner and name not in LAZY.get(imported, ()):
            found.append(f"{name} imports {imported} inside a function")
        if imported == "geode_jax":
            found.append(f"{name}: import the module that defines a name")
        elif imported.startswith("geode_jax."):
            other = _folder(imported.removeprefix("geode_jax."))
            if other != folder and not LAYERS[other] < LAYERS[folder]:
                found.append(f"{name} imports {imported}")
        elif imported.split(".")[0] in FORBIDDEN.get(folder, ()):
            found.append(f"{name} imports {imported}")
    reached = _reached(name, imports)
    if name in reached:
        found.append(f"{name} leads back to itself")
    found += [f"{name} reaches {package}" for package in reached & UNREACHABLE.get(folder, set())]
    return found


@pytest.mark.parametrize("name", list(IMPORTS))
def test_imports_point_down(name):
    assert not _problems(name, IMPORTS)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("gibbs.sweep", "geode_jax.forest.forest"),  # beside it
        ("model.state", "geode_jax.gibbs.sweep"),  # above it
        ("model.tree", "geode_jax.model.dictionary"),  # a cycle inside a folder
        ("math.lowrank", "scipy"),
        ("rows.view", "jax"),
        ("model.joint", "geode_jax.partition.metis"),  # lower, but it reaches pymetis
    ],
)
def test_a_wrong_import_is_seen(module, imported):
    assert _problems(module, {**IMPORTS, module: [*IMPORTS[module], (imported, False)]})


def test_a_wrong_import_is_seen_from_afar():
    """The sampler would reach METIS through a module that may import what does."""
    changed = {**IMPORTS, "model.problem": [*IMPORTS["model.problem"], ("geode_jax.learning.subspaces", False)]}
    assert any("pymetis" in problem for problem in _problems("gibbs.run", changed))


def test_the_top_level_is_the_public_face():
    beside = {path.stem for path in ROOT.glob("*.py")}
    assert beside == {"__init__", "__main__", "_checks", "_typing", "_version", "diagnostics", "settings", "truncation"}


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
        "assert not {'pynndescent', 'numba', 'matplotlib', 'numpyro'} & set(sys.modules);"
        "geode_jax.truncation.rank_for, geode_jax.diagnostics.report"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)

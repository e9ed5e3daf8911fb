"""Examples in the README and in docstrings run and say what they say; the notebooks' code is valid."""

import doctest
import importlib
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

import geode_jax

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_readme(capsys):
    """Its example runs, and prints what the README shows, up to what another machine's rounding changes."""
    text = (ROOT / "README.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.S).groups()
    namespace: dict = {}
    exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    words, numbers = r"[A-Za-z_%]+", r"\d+\.\d+|\.\d+|\d+(?=%)"
    assert re.findall(words, printed) == re.findall(words, shown)
    ours, theirs = (np.array(re.findall(numbers, text), float) for text in (printed, shown))
    np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=0.1)
    assert namespace["model"].novelty(namespace["strange"]).max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["notebooks/guides/scikit_learn.md", "notebooks/guides/numpyro.md"], ids=lambda page: page[:-3]
)
def test_examples(page):
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.parametrize("name", ["classifier", "density", "imputer", "regressor"])
@pytest.mark.slow
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"geode_jax.estimators.{name}"))
    assert result.attempted > 4
    assert result.failed == 0


def test_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (ROOT / "notebooks" / "reference").glob("*.md"))
    listed = re.findall(r"^::: geode_jax\.(?:\w+\.)?(\w+)$", pages, flags=re.MULTILINE)
    assert set(geode_jax.__all__) <= set(listed)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_with_their_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        compile(cell.source, path.name, "exec")
        assert not any(output.output_type == "error" for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path, monkeypatch, tmp_path):
    """At reduced size, in this process; about a minute each, compilation included."""
    monkeypatch.setenv("REDUCED", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, path.name, "exec"), namespace)

"""Moments of cells: summed upwards, by part, and what is learned from them."""

import functools

import numpy as np
import pytest
from scipy import linalg

from geode_jax.learning import moments
from geode_jax.learning.moments import MomentSums, joined, moments_of
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import Parts
from geode_jax.rows.view import View


def _uneven_tree(num_rows):
    """Three scales; of the right half, one child is smaller than the features are many, and one is a leaf."""
    rows = np.random.default_rng(1).permutation(num_rows)
    half, few = num_rows // 2, 5
    cells = [rows, rows[:half], rows[half:], rows[: half // 2], rows[half // 2 : half]]
    cells += [rows[half : half + few], rows[half + few :]]
    cells += [rows[: half // 4], rows[half // 4 : half // 2], *[None] * 4, rows[half + few : -20], rows[-20:]]
    return Partition(3, tuple(None if cell is None else np.sort(cell) for cell in cells))


@pytest.mark.parametrize("num_bytes", [0, 6000, 20_000, 2**28], ids=["a node", "a scale", "two scales", "all"])
@pytest.mark.parametrize("holdouts", [[(), (0,), (1,)], [(0, 1)], [(2,), (0, 1)]], ids=str)
def test_moments_are_summed_upwards(num_bytes, holdouts, monkeypatch):
    """They are those of each cell's own rows, whatever part of the tree fits in memory."""
    x = np.random.default_rng(0).normal(size=(120, 6)) - 5.0
    folds = np.arange(120) % 4 - 1  # fold -1 is kept by all
    monkeypatch.setattr(moments, "MOMENT_BYTES", num_bytes)
    tree, parts = _uneven_tree(120), Parts.of(120, folds, holdouts)
    nodes = [node for node in range(15) if tree.cells[node] is not None and tree.cell(node).size >= 6]
    sums = MomentSums(x, tree, parts, nodes)
    for scale in range(4):
        sums.reach(scale)
        for node in (node for node in nodes if 2**scale - 1 <= node < 2 ** (scale + 1) - 1):
            found = sums.take(node)
            for out, holdout in enumerate(holdouts):
                own = x[tree.cell(node)[~np.isin(folds[tree.cell(node)], holdout)]]
                mean, scatter = found.kept(parts.is_kept[out])
                assert found.num_rows[parts.is_kept[out]].sum() == len(own)
                np.testing.assert_allclose(mean, own.mean(axis=0), rtol=1e-12)
                np.testing.assert_allclose(scatter, len(own) * np.cov(own.T, bias=True), rtol=1e-9, atol=1e-9)
            used = tree.cell(node)[parts.of_row[tree.cell(node)] >= 0]
            assert found.largest == np.abs(x[used]).max()


@pytest.mark.parametrize("cells", ["a tree", "not nested"])
@pytest.mark.parametrize("folds", [None, np.arange(120) % 5], ids=["no folds", "folds"])
def test_rows_are_read_once_for_all_scales_and_folds(cells, folds):
    """If moments fit in memory. Rows of a file are converted whenever they are read."""
    read = []

    class Recording(View):
        def __getitem__(self, index):
            read.append(index[0] if isinstance(index, tuple) else index)
            return super().__getitem__(index)

    x = Recording(np.random.default_rng(0).normal(size=(120, 6)), np.ones(6))
    tree = _uneven_tree(120)
    few = tree.cell(5)  # learned from its Gram matrix
    if cells == "not nested":
        tree, few = Partition(0, tuple(tree.cell(node) for node in tree.nodes_at(3) if node != 5)), few[:0]
    learn_subspaces(x, tree, SubspaceOptions(3, 0), folds)
    rows = np.concatenate([own for own in read if not np.isin(own, few).all()])
    np.testing.assert_array_equal(np.sort(rows), np.setdiff1d(np.arange(120), _uneven_tree(120).cell(5)))


def test_moments_of_close_rows_far_from_the_origin():
    """Deviations of 1e-6 at a distance of 1e6, in blocks and parts, lose no digits beyond those of the rows."""
    x = 1e6 + 1e-6 * np.random.default_rng(0).normal(size=(4000, 3))
    first, *others = (moments_of(x, np.arange(start, 4000, 4)) for start in range(4))
    centred = (x - x[0]) - (x - x[0]).mean(axis=0)
    whole = functools.reduce(joined, others, first)
    np.testing.assert_allclose(whole.scatter[0], centred.T @ centred, rtol=1e-3, atol=1e-3 * 4000e-12)


def test_cells_that_are_not_nested():
    """Those of a middle scale: each is learned from its own rows, though nodes of a tree would have these places."""
    x = np.random.default_rng(0).normal(size=(120, 6))
    cells = tuple(np.arange(start, start + 20) for start in range(0, 120, 20))
    found = learn_subspaces(x, Partition(0, cells), SubspaceOptions(3, 0), None)
    for node, rows in enumerate(cells):
        centre = x[rows].mean(axis=0)
        basis = np.linalg.svd(x[rows] - centre)[2][:3].T
        np.testing.assert_allclose(found.centres[0, node], centre, atol=1e-12)
        assert linalg.subspace_angles(found.bases[0, node], basis).max() < 1e-6


@pytest.mark.parametrize("holdouts", [[()], [(), (0,), (1,), (2,)], [(0, 1)], [(0, 2), (1,)]], ids=str)
def test_parts_are_as_few_as_tell_holdouts_apart(holdouts):
    folds = np.array([0, 1, 2, 0, -1, 2])
    parts = Parts.of(6, folds, holdouts)
    for out, holdout in enumerate(holdouts):
        is_kept = (parts.of_row >= 0) & parts.is_kept[out][parts.of_row]
        np.testing.assert_array_equal(is_kept, ~np.isin(folds, holdout))
    assert parts.number == len({tuple(fold in holdout for holdout in holdouts) for fold in folds} - {(True,)})

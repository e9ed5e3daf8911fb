import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geode_jax.model import tree as tree_module
from geode_jax.model.tree import tree_from_mask


def _full(depth):
    return tree_from_mask(np.ones(2 ** (depth + 1) - 1, bool))


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_weights_follow_the_path(depth):
    """Against the definition: stop at k, times not stopping and the turn taken at every ancestor."""
    tree = _full(depth)
    key_stop, key_right = jax.random.split(jax.random.key(depth))
    logit_stop = jnp.where(tree.is_internal, jax.random.normal(key_stop, (tree.num_nodes,)), jnp.inf)
    logit_right = jax.random.normal(key_right, (tree.num_nodes,))
    stop, right = (np.asarray(jax.nn.sigmoid(it), np.float64) for it in (logit_stop, logit_right))
    expected = []
    for k in range(tree.num_nodes):
        weight, child = stop[k], k
        while child:
            parent = (child - 1) // 2
            weight *= (1 - stop[parent]) * (right[parent] if child == 2 * parent + 2 else 1 - right[parent])
            child = parent
        expected.append(weight)
    found = np.exp(tree.log_weights(logit_stop, logit_right))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-5)


def test_absent_nodes_get_no_weight():
    mask = np.array([True, True, True, False, False, True, True])
    tree = tree_from_mask(mask)
    assert list(np.asarray(tree.is_leaf)) == [False, True, False, False, False, True, True]
    logit_stop = jnp.where(tree.is_internal, 0.0, jnp.inf)
    weights = np.exp(tree.log_weights(logit_stop, jnp.zeros(7)))
    np.testing.assert_allclose(weights, [1 / 2, 1 / 4, 1 / 8, 0, 0, 1 / 16, 1 / 16], rtol=1e-6)


def test_subtree_sums_and_right_children():
    tree = _full(2)
    values = jnp.arange(7.0)
    totals = tree.subtree_sum(values)
    np.testing.assert_array_equal(totals, [21, 1 + 3 + 4, 2 + 5 + 6, 3, 4, 5, 6])
    np.testing.assert_array_equal(tree.right_child(totals), [13, 4, 6, 0, 0, 0, 0])
    np.testing.assert_array_equal(tree.sum_over_scales(values), [0, 3, 18])
    np.testing.assert_array_equal(tree.sum_over_scales(jnp.stack([values, 2.0 * values])), [[0, 3, 18], [0, 6, 36]])


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_subtree_sums_level_by_level(depth, monkeypatch):
    tree = _full(depth)
    values = jnp.asarray(np.random.default_rng(0).integers(0, 100, tree.num_nodes), jnp.float32)
    at_once = tree.subtree_sum(values)
    monkeypatch.setattr(tree_module, "FEW_FOR_PAIRS", 0)
    np.testing.assert_array_equal(tree.subtree_sum(values), at_once)


@pytest.mark.parametrize("mask", [[False], [True, True, False], [True, False, False, True, True, False, False]])
def test_impossible_trees_are_refused(mask):
    with pytest.raises(ValueError, match="is_present"):
        tree_from_mask(np.array(mask))


def test_trees_of_several_masks():
    masks = np.array([[True] * 7, [True] * 3 + [False] * 4])
    together = tree_from_mask(masks)
    for number, mask in enumerate(masks):
        alone = tree_from_mask(mask)
        assert together.depth == alone.depth == 2
        np.testing.assert_array_equal(together.is_present[number], alone.is_present)
        np.testing.assert_array_equal(together.is_leaf[number], alone.is_leaf)
    masks[1, 4] = True
    with pytest.raises(ValueError, match="both children or none"):
        tree_from_mask(masks)

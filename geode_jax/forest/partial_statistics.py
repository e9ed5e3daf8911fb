"""Reduction of rows with missing features to what the sampler needs of them: all work of size D is done here, once."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax._typing import Array
from geode_jax.math.lowrank import masked_gram, missing_root, observe
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.rows.training import Training
from geode_jax.rows.view import as_array

# Rows of one node that are reduced at once: only two sizes, as each size is compiled.
_SMALL_CHUNK, _LARGE_CHUNK = 8, 64


class Grouping(NamedTuple):
    """The place of every row, the same for every tree: `rows` (G, B), -1 at empty places; and each row's `pattern`.

    A pattern is a set of observed features. `is_shared`: whether patterns are so few that rows share their matrices.
    `num_matrices`: matrices per candidate node.
    """

    rows: np.ndarray
    pattern: np.ndarray
    is_shared: bool
    num_matrices: int


def group_rows(is_observed: np.ndarray, folds: np.ndarray, num_groups: int) -> Grouping:
    """Divide rows with missing features, (n_m, D), into groups; rows that can share matrices are adjacent."""
    num_rows = is_observed.shape[0]
    packed = np.packbits(is_observed.astype(bool), axis=1)
    pattern = np.unique(packed, axis=0, return_inverse=True)[1].reshape(-1)
    distinct = np.unique(np.stack([pattern, folds]), axis=1).shape[1]
    is_shared = 2 * distinct <= num_rows
    size = -(-num_rows // num_groups)
    places = np.full(num_groups * size, -1)
    if is_shared:
        places[:num_rows] = np.lexsort((folds, pattern))
        return Grouping(places.reshape(num_groups, size), pattern, True, distinct)
    places[:num_rows] = np.arange(num_rows)
    return Grouping(places.reshape(size, num_groups).T, pattern, False, num_rows)


_gram, _root, _observe = jax.jit(masked_gram), jax.jit(missing_root), jax.jit(observe)


@one_blas_thread()
def reduce_rows(
    dictionary: tuple[np.ndarray, np.ndarray],
    rows: Training,
    candidates: np.ndarray,
    grouping: Grouping,
    *,
    with_root: bool = True,
) -> PartialRows:
    """Statistics of rows with missing features at their `candidates`, (n_m, M).

    `dictionary`: centres (H, K, D) and bases (H, K, D, d); a row's fold is the index of its dictionary. The values of
    rows at missing entries are ignored.
    """
    centres, bases = dictionary
    x, is_observed, folds = as_array(rows.x), rows.mask, rows.own_folds
    num_nodes, rank = centres.shape[1], bases.shape[3]
    places, shape = grouping.rows, candidates.shape
    vectors = np.zeros((3, *shape, rank), x.dtype)
    residual = np.zeros(shape, x.dtype)
    keys = np.stack(np.broadcast_arrays(folds[:, None], candidates, grouping.pattern[:, None]), axis=-1)
    if not grouping.is_shared:
        keys[..., 2] = np.arange(x.shape[0])[:, None]
    distinct, position = np.unique(keys.reshape(-1, 3), axis=0, return_inverse=True)
    position = position.reshape(shape)
    example = np.zeros(distinct.shape[0], dtype=int)
    example[position] = np.arange(x.shape[0])[:, None]
    gram = np.zeros((distinct.shape[0], rank, rank), x.dtype)
    root = np.zeros_like(gram) if with_root else None
    starts = np.flatnonzero(np.any(np.diff(distinct[:, :2], axis=0, prepend=-1) != 0, axis=1))
    for first, last in zip(starts, np.append(starts[1:], distinct.shape[0]), strict=True):
        fold, node = distinct[first, :2]
        basis, centre = jnp.asarray(bases[fold, node]), jnp.asarray(centres[fold, node])
        for index in _chunks(np.arange(first, last)):
            seen = jnp.asarray(is_observed[example[index]], x.dtype)
            gram[index] = np.asarray(_gram(seen, basis))
            if root is not None:
                root[index] = np.asarray(_root(1.0 - seen, basis))
        at = np.argwhere((folds[:, None] == fold) & (candidates == node))
        for index in _chunks(np.arange(at.shape[0])):
            row, slot = at[index].T
            seen, own_gram = jnp.asarray(is_observed[row], x.dtype), jnp.asarray(gram[position[row, slot]])
            shown = _observe(jnp.asarray(x[row]), seen, centre, basis, own_gram)
            residual[row, slot] = np.asarray(shown.residual)
            for store, leaf in zip(vectors, (shown.cross, shown.start, shown.remainder), strict=True):
                store[row, slot] = np.asarray(leaf)

    is_row = places >= 0
    row = np.maximum(places, 0)
    entries, entry_node, entry = _group_entries(position[row], distinct[:, 1], is_row, grouping.is_shared)
    total = is_observed.sum(axis=1)
    return PartialRows(
        node=jnp.asarray(np.where(is_row[..., None], candidates[row], num_nodes), jnp.int32),
        entry=None if entry is None else jnp.asarray(entry, jnp.int32),
        entry_node=jnp.asarray(entry_node, jnp.int32),
        gram=jnp.asarray(gram[entries]),
        root=None if root is None else jnp.asarray(root[entries]),
        cross=jnp.asarray(vectors[0][row]),
        start=jnp.asarray(vectors[1][row]),
        remainder=jnp.asarray(vectors[2][row]),
        residual=jnp.asarray(residual[row]),
        num_observed=jnp.asarray(total[row], x.dtype),
        num_missing=jnp.asarray(x.shape[1] - total[row], x.dtype),
    )


def _chunks(index: np.ndarray) -> list[np.ndarray]:
    """Split `index` into chunks, all of one of the two sizes; the last chunk is padded with its final element."""
    size = _LARGE_CHUNK if 2 * index.size > _LARGE_CHUNK else _SMALL_CHUNK
    padded = np.append(index, np.repeat(index[-1:], -index.size % size))
    return list(padded.reshape(-1, size))


def _group_entries(
    position: np.ndarray, node: np.ndarray, is_row: np.ndarray, is_shared: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Matrices of every group, (G, P), their nodes, and which one a candidate uses; `position` is (G, B, M)."""
    if not is_shared:
        entries = position.reshape(position.shape[0], -1)
        return entries, node[entries], None
    own = [np.unique(group[here]) for group, here in zip(position, is_row, strict=True)]
    most = max(used.size for used in own)
    entries = np.stack([np.append(used, np.repeat(used[-1:], most - used.size)) for used in own])
    entry = np.zeros(position.shape, dtype=int)
    for number, used in enumerate(own):
        entry[number] = np.minimum(np.searchsorted(used, position[number]), used.size - 1)
    return entries, node[entries], entry


def stack_trees(trees: list[PartialRows]) -> PartialRows:
    """Stack the trees along a leading axis F; as trees may need different numbers of matrices, these are padded."""
    most = max(tree.gram.shape[1] for tree in trees)

    def padded(tree: PartialRows) -> PartialRows:
        def pad(table: Array) -> Array:
            return jnp.pad(table, ((0, 0), (0, most - table.shape[1])) + ((0, 0),) * (table.ndim - 2), mode="edge")

        tables = (tree.entry_node, tree.gram, tree.root)
        return eqx.tree_at(lambda it: (it.entry_node, it.gram, it.root), tree, jax.tree.map(pad, tables))

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(padded(tree) for tree in trees))

"""Reduction of rows with missing features to what the sampler needs of them: all work of size D is done here, once."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.threads import parallel_map
from geode_jax.math.lowrank import ridge_of
from geode_jax.model.on_host import on_host
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.rows.training import Training
from geode_jax.rows.view import as_array

# Fields of PartialRows by name, NumPy arrays or None.
Reduced: TypeAlias = dict[str, Any]

# About how many numbers a thread holds at once; it bounds the memory.
_CHUNK_NUMBERS = 2**22


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
    num_groups = -(-num_rows // size)  # none without rows
    places = np.full(num_groups * size, -1)
    if is_shared:
        places[:num_rows] = np.lexsort((folds, pattern))
        return Grouping(places.reshape(num_groups, size), pattern, True, distinct)
    places[:num_rows] = np.arange(num_rows)
    return Grouping(places.reshape(size, num_groups).T, pattern, False, num_rows)


@one_blas_thread()
def reduce_rows(
    dictionary: tuple[np.ndarray, np.ndarray],
    rows: Training,
    candidates: np.ndarray,
    grouping: Grouping,
    *,
    with_root: bool = True,
) -> Reduced:
    """Statistics of rows with missing features at their `candidates`, (n_m, M): the fields of :class:`PartialRows`.

    `dictionary`: centres (H, K, D) and bases (H, K, D, d); a row's fold is the index of its dictionary. The values of
    rows at missing entries are ignored, or of whitened rows what they do not show.
    """
    centres, bases = dictionary
    x, is_observed, folds, unseen = as_array(rows.x), rows.mask, rows.own_folds, rows.unseen
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
    # matrices, and pairs of row and slot, in order of fold and node
    starts = np.flatnonzero(np.any(np.diff(distinct[:, :2], axis=0, prepend=-1) != 0, axis=1))
    of_pair = (np.searchsorted(starts, position, side="right") - 1).ravel()
    pairs = np.argsort(of_pair, kind="stable")
    pair_starts = np.searchsorted(of_pair[pairs], np.arange(starts.size))

    def make_matrices(here: slice) -> None:
        fold, node = distinct[here.start, :2]
        basis, seen = bases[fold, node], is_observed[example[here]]
        if unseen is None:
            gram[here] = _masked_gram(seen, basis)
            if root is not None:
                root[here] = _missing_root(~seen, basis)
            return
        # in float64: of a difference, float32 could leave directions that are not seen with less than nothing
        basis = basis.astype(np.float64)
        along = unseen.of_basis(example[here], unseen.turned(example[here.start], basis))
        hidden = np.matmul(np.swapaxes(along, 1, 2), along)
        gram[here] = basis.T @ basis - hidden
        if root is not None:
            root[here] = _unseen_root(along, hidden, (~seen).sum(axis=1), basis)

    def make_vectors(here: slice) -> None:
        row, slot = np.divmod(pairs[here], shape[1])
        fold, node = distinct[position[row[0], slot[0]], :2]
        basis, seen, own = bases[fold, node], is_observed[row], gram[position[row, slot]]
        off = x[row] - centres[fold, node]
        if unseen is None:
            shown = np.where(seen, off, 0.0)
            cross = shown @ basis
            coordinates = np.linalg.solve(_ridged(own), cross[..., None])[..., 0]
            error = shown - np.where(seen, coordinates @ basis.T, 0.0)
            square, remainder = np.square(error).sum(axis=1), error @ basis
        else:  # of v - N N'v, without a product of size D x D for each
            turned, along = unseen.turned(row[0], basis), unseen.along(row, off)
            cross = off @ basis - unseen.spread(row, along) @ turned
            coordinates = np.linalg.solve(_ridged(own), cross[..., None])[..., 0]
            error = off - coordinates @ basis.T
            along -= unseen.of_turned(row, coordinates @ turned.T)
            square = np.maximum(np.square(error).sum(axis=1) - np.square(along).sum(axis=1), 0.0)
            remainder = error @ basis - unseen.spread(row, along) @ turned
        residual[row, slot] = square
        for store, values in zip(vectors, (cross, coordinates, remainder), strict=True):
            store[row, slot] = values

    num_features, of_unseen = x.shape[1], 0 if unseen is None else unseen.numbers
    parallel_map(make_matrices, _spans(starts, distinct.shape[0], rank * num_features + of_unseen))
    parallel_map(make_vectors, _spans(pair_starts, pairs.size, 8 * num_features + rank**2 + of_unseen))

    is_row = places >= 0
    row = np.maximum(places, 0)
    entries, entry_node, entry = _group_entries(position[row], distinct[:, 1], is_row, grouping.is_shared)
    total = is_observed.sum(axis=1)
    return {
        "node": np.where(is_row[..., None], candidates[row], num_nodes).astype(np.int32),
        "entry": None if entry is None else entry.astype(np.int32),
        "entry_node": entry_node.astype(np.int32),
        "gram": gram[entries],
        "root": None if root is None else root[entries],
        "cross": vectors[0][row],
        "start": vectors[1][row],
        "remainder": vectors[2][row],
        "residual": residual[row],
        "num_observed": total[row].astype(x.dtype),
        "num_missing": (x.shape[1] - total[row]).astype(x.dtype),
    }


def _spans(starts: np.ndarray, stop: int, numbers_each: int) -> list[slice]:
    """What lies between the `starts`, cut further so that no span makes many more than `_CHUNK_NUMBERS` numbers."""
    size = max(1, _CHUNK_NUMBERS // max(1, numbers_each))
    return [
        slice(start, min(start + size, last))
        for first, last in zip(starts.tolist(), [*starts[1:].tolist(), stop], strict=True)
        for start in range(first, last, size)
    ]


def _masked_gram(mask: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Inner products of the columns of a basis (D, d) over the features of each mask, (m, d, d)."""
    num_features, rank = basis.shape
    masked = mask[:, None, :] * np.ascontiguousarray(basis.T)
    return (masked.reshape(-1, num_features) @ basis).reshape(-1, rank, rank)


def _ridged(gram: np.ndarray) -> np.ndarray:
    return gram + ridge_of(gram.dtype) * np.eye(gram.shape[-1], dtype=gram.dtype)


def _missing_root(is_missing: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """A root L of the Gram matrix over the missing features, ``L L' = Phi_M'Phi_M``, (m, d, d).

    With m missing features only the first min(m, d) columns are nonzero. So ``Phi_M'eps = L w``, and the squared norm
    of eps splits into that of w, in min(m, d) dimensions, and an independent rest.
    """
    rank = basis.shape[1]
    root = np.zeros((is_missing.shape[0], rank, rank), basis.dtype)
    is_few = is_missing.sum(axis=1) < rank
    if is_few.any():
        order = np.argsort(~is_missing[is_few], axis=1, kind="stable")[:, :rank]
        taken = np.take_along_axis(is_missing[is_few], order, axis=1)
        root[is_few, :, : order.shape[1]] = np.swapaxes(basis[order] * taken[..., None], 1, 2)
    if not is_few.all():
        root[~is_few] = _factor(_masked_gram(is_missing[~is_few], basis), basis)
    return root


def _factor(gram: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Cholesky factors of Gram matrices of a basis, (m, d, d), with nothing along directions that are not there."""
    return np.asarray(np.any(basis != 0.0, axis=0)[:, None] * np.linalg.cholesky(_ridged(gram)))


def _unseen_root(along: np.ndarray, hidden: np.ndarray, number: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """:func:`_missing_root` of whitened rows: of ``along' along``, `hidden`, with `number` directions unseen, (m,)."""
    rank = basis.shape[1]
    root = np.zeros_like(hidden)
    is_few = number < rank
    few = np.swapaxes(along[is_few, :rank], 1, 2)
    root[is_few, :, : few.shape[2]] = few
    if not is_few.all():
        root[~is_few] = _factor(hidden[~is_few], basis)
    return root


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


def stack_trees(trees: list[Reduced]) -> PartialRows:
    """Stack the trees along a leading axis F; as trees may need different numbers of matrices, these are padded.

    The result has NumPy arrays.
    """
    most = max(tree["gram"].shape[1] for tree in trees)

    def stacked(name: str) -> np.ndarray | None:
        tables = [tree[name] for tree in trees]
        if tables[0] is None:
            return None
        if name in ("entry_node", "gram", "root"):
            tables = [table if table.shape[1] == most else _longer(table, most) for table in tables]
        return np.stack(tables)

    return on_host(PartialRows, **{name: stacked(name) for name in trees[0]})


def _longer(table: np.ndarray, length: int) -> np.ndarray:
    """Repeat what is last along the second axis up to a length."""
    return np.concatenate([table, np.repeat(table[:, -1:], length - table.shape[1], axis=1)], axis=1)

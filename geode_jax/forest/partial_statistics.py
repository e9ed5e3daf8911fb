"""Reduction of rows with missing features to what the sampler needs of them: all work of size D is done here, once."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.threads import parallel_map
from geode_jax.math.lowrank import ridge_of
from geode_jax.model.on_host import on_host
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.rows.blocks import slices
from geode_jax.rows.training import Training
from geode_jax.rows.unseen import Unseen
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
    # matrices in the order of fold and node, and pairs of row and slot in that of their matrices
    starts = np.flatnonzero(np.any(np.diff(distinct[:, :2], axis=0, prepend=-1) != 0, axis=1))
    pairs = np.argsort(position, axis=None, kind="stable")
    pair_starts = np.searchsorted(position.ravel()[pairs], np.arange(distinct.shape[0] + 1))
    num_features, of_unseen = x.shape[1], 0 if unseen is None else unseen.numbers
    numbers_each = rank**2 + rank * num_features + of_unseen
    at_missing = np.zeros((x.shape[0], 0 if unseen is None else unseen.missing.shape[1]))
    if unseen is not None:
        for some in slices(*x.shape):
            every = np.arange(some.start, some.stop)
            at_missing[some] = unseen.at_missing(every, x[some].astype(np.float64))

    def reduce(here: slice) -> None:
        fold, node = distinct[here.start, :2]
        which, basis = example[here], bases[fold, node]
        seen = is_observed[which]
        if unseen is None:
            at_node: _Observed | _Shown = _Observed.of(seen, basis)
        else:
            at_node = _Shown.of(unseen, which, centres[fold, node], basis, at_missing)
        gram[here] = at_node.gram
        if root is not None:
            root[here] = at_node.root((~seen).sum(axis=1))
        ridged = _ridged(gram[here])
        inside = pairs[pair_starts[here.start] : pair_starts[here.stop]]
        for some in slices(inside.size, numbers_each, numbers=_CHUNK_NUMBERS):
            row, slot = np.divmod(inside[some], shape[1])
            own = position[row, slot] - here.start
            off = x[row] - centres[fold, node]
            residual[row, slot], *found = at_node.reduced(off, row, own, ridged[own])
            for store, values in zip(vectors, found, strict=True):
                store[row, slot] = values

    parallel_map(reduce, _spans(starts, distinct.shape[0], numbers_each))

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


# Of some rows at a node: squared residuals (b,), and, (b, d) each, `cross`, `start` and `remainder`.
_Vectors: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class _Observed(NamedTuple):
    """A node's basis (D, d) as k rows observe it: `seen` (k, D), and `gram` (k, d, d), in float64."""

    seen: np.ndarray
    basis: np.ndarray
    gram: np.ndarray

    @classmethod
    def of(cls, seen: np.ndarray, basis: np.ndarray) -> "_Observed":
        """Gram matrices are sums over the features that are seen, or over all less those over the rest: the fewer."""
        by_rest = 2 * seen.sum(axis=1) >= seen.shape[1]
        part = _taken(np.where(by_rest[:, None], ~seen, seen), basis.astype(np.float64))
        gram = np.matmul(np.swapaxes(part, 1, 2), part)
        gram[by_rest] = _whole(basis) - gram[by_rest]
        return cls(seen, basis, gram)

    def root(self, num_missing: np.ndarray) -> np.ndarray:
        """A root L of the Gram matrix over the missing features, ``L L' = Phi_M'Phi_M``, (k, d, d).

        With m missing features only the first min(m, d) columns are nonzero. So ``Phi_M'eps = L w``, and the squared
        norm of eps splits into that of w, in min(m, d) dimensions, and an independent rest.
        """
        is_few = num_missing < self.basis.shape[1]
        return _root(_whole(self.basis) - self.gram, is_few, _taken(~self.seen[is_few], self.basis), self.basis)

    def reduced(self, off: np.ndarray, rows: np.ndarray, own: np.ndarray, ridged: np.ndarray) -> _Vectors:
        """Of rows' differences from the centre; which matrices they have, `own`, with Gram matrices `ridged`."""
        seen = self.seen[own]
        shown = np.where(seen, off, 0.0)
        cross = shown @ self.basis
        coordinates = _solved(ridged, cross)
        error = shown - np.where(seen, coordinates @ self.basis.T, 0.0)
        return np.square(error).sum(axis=1), cross, coordinates, error @ self.basis


class _Shown(NamedTuple):
    """:class:`_Observed` of whitened rows, in float64: of a difference, float32 could leave less than nothing.

    `along`, (k, u, d): the basis along the directions N that are not seen. Products with what is seen, ``v - N N'v``,
    are those of v less those of ``N'v``. `centre`: W times the centre, (D,). `at_missing`: of all rows, W times the row
    at the features that it misses, (n, u).
    """

    unseen: Unseen
    basis: np.ndarray
    along: np.ndarray
    gram: np.ndarray
    hidden: np.ndarray
    centre: np.ndarray
    at_missing: np.ndarray

    @classmethod
    def of(
        cls, unseen: Unseen, rows: np.ndarray, centre: np.ndarray, basis: np.ndarray, at_missing: np.ndarray
    ) -> "_Shown":
        """Of rows that were whitened by one matrix, one for each of the k matrices."""
        basis = basis.astype(np.float64)
        turned = unseen.turned(rows[0], np.column_stack([centre, basis]))
        along = unseen.of_basis(rows, turned[:, 1:])
        hidden = np.matmul(np.swapaxes(along, 1, 2), along)
        return cls(unseen, basis, along, basis.T @ basis - hidden, hidden, turned[:, 0], at_missing)

    def root(self, num_missing: np.ndarray) -> np.ndarray:
        """:meth:`_Observed.root`: as many directions are not seen as features are missing."""
        rank = self.basis.shape[1]
        is_few = num_missing < rank
        return _root(self.hidden, is_few, self.along[is_few, :rank], self.basis)

    def reduced(self, off: np.ndarray, rows: np.ndarray, own: np.ndarray, ridged: np.ndarray) -> _Vectors:
        """:meth:`_Observed.reduced`."""
        off, basis_along = off.astype(np.float64), self.along[own]

        def seen_along(vectors: np.ndarray, along: np.ndarray) -> np.ndarray:
            return vectors @ self.basis - np.matmul(along[:, None], basis_along)[:, 0]

        missing = self.unseen.missing[self.unseen.place[rows]]
        along = self.unseen.of_missing(rows, self.at_missing[rows] - self.centre[missing])
        cross = seen_along(off, along)
        coordinates = _solved(ridged, cross)
        error = off - coordinates @ self.basis.T
        along = along - np.matmul(basis_along, coordinates[..., None])[..., 0]
        square = np.maximum(np.square(error).sum(axis=1) - np.square(along).sum(axis=1), 0.0)
        return square, cross, coordinates, seen_along(error, along)


def _solved(matrices: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.solve(matrices, right[..., None])[..., 0])


def _whole(basis: np.ndarray) -> np.ndarray:
    wide = basis.astype(np.float64)
    return np.asarray(wide.T @ wide)


def _taken(mask: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Rows of a basis (D, d) at the features of each mask (k, D), then zeros: (k, u, d), u being the most features."""
    number = mask.sum(axis=1)
    index = np.argsort(~mask, axis=1, kind="stable")[:, : number.max(initial=0)]
    taken = basis[index]
    taken[np.arange(index.shape[1]) >= number[:, None]] = 0.0
    return taken


def _ridged(gram: np.ndarray) -> np.ndarray:
    return gram + ridge_of(gram.dtype) * np.eye(gram.shape[-1], dtype=gram.dtype)


def _root(hidden: np.ndarray, is_few: np.ndarray, few: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Roots of the matrices `hidden`, (k, d, d): where there are few, ``few few'`` being these; else by Cholesky.

    With nothing along directions that are not there.
    """
    root = np.zeros_like(hidden)
    root[is_few, :, : few.shape[1]] = np.swapaxes(few, 1, 2)
    if not is_few.all():
        root[~is_few] = np.any(basis != 0.0, axis=0)[:, None] * np.linalg.cholesky(_ridged(hidden[~is_few]))
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

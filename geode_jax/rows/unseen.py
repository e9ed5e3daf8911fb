"""What rows with missing features do not show, in coordinates where the noise is isotropic.

Rows are ``x = R z``, and ``W = R^{-1}`` is symmetric. A row that misses the features M shows all of z but its part in
the span of the columns of W at M: along these, z may change while the observed features stay. With ``L L'`` their Gram
matrix, an orthonormal basis N of the span has ``N'v = L^{-1} (W v)_M``. Where W is the identity, N selects the missing
features.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from scipy.linalg import lapack

from geode_jax._runtime.threads import parallel_map
from geode_jax.rows.blocks import slices


class Unseen(NamedTuple):
    """The directions N that each of m partial rows does not show, at most u of them.

    - `place`: (n,), which of the m a row is; -1 if it is complete.
    - `which`: (m,), the number of each one's matrix W, (D, D), among the `whitenings`.
    - `rounded`: the same matrices in the rows' dtype.
    - `missing`: (m, u), the features that it misses, and then others. `factor`: (m, u, u), L^{-1}, zero beyond these.
    - `log_det`: (m,), of L.

    In float64, but for `rounded`; products with vectors in the precision of these.
    """

    place: np.ndarray
    which: np.ndarray
    whitenings: Mapping[int, np.ndarray]
    rounded: Mapping[int, np.ndarray]
    missing: np.ndarray
    factor: np.ndarray
    log_det: np.ndarray

    @classmethod
    def of(
        cls, is_observed: np.ndarray, which: np.ndarray, whitenings: Mapping[int, np.ndarray], dtype: DTypeLike
    ) -> "Unseen":
        """What rows of these masks, (n, D), do not show, each whitened by the matrix of its number, (n,)."""
        partial = np.flatnonzero(~is_observed.all(axis=1))
        place = np.full(len(is_observed), -1)
        place[partial] = np.arange(partial.size)
        own, number = which[partial], (~is_observed[partial]).sum(axis=1)
        index = np.argsort(is_observed[partial], axis=1, kind="stable")[:, : number.max(initial=0)]
        factor = np.zeros((*index.shape, index.shape[1]))
        log_det = np.zeros(partial.size)
        squares = {number: whitenings[number] @ whitenings[number] for number in np.unique(own).tolist()}

        def make(row: int) -> None:
            missing = index[row, : number[row]]
            lower = np.linalg.cholesky(squares[own[row]][np.ix_(missing, missing)])
            log_det[row] = np.log(np.diagonal(lower)).sum()
            factor[row, : missing.size, : missing.size] = lapack.dtrtri(lower, lower=1)[0]

        parallel_map(make, range(partial.size))
        rounded = {number: matrix.astype(dtype, copy=False) for number, matrix in whitenings.items()}
        return cls(place, own, whitenings, rounded, index, factor, log_det)

    @property
    def num_features(self) -> int:
        """D."""
        return next(iter(self.whitenings.values())).shape[0]

    @property
    def numbers(self) -> int:
        """How many numbers a row's factor has."""
        return self.missing.shape[1] ** 2

    def taken(self, rows: np.ndarray) -> "Unseen":
        """That of some of the rows."""
        return self._replace(place=self.place[rows])

    def along(self, rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """``N'v`` of a vector for each of some partial rows, (k, D): (k, u)."""
        return self.of_missing(rows, self.at_missing(rows, vectors))

    def at_missing(self, rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """``(W v)_M`` of a vector for each of some partial rows, (k, D): (k, u)."""
        return np.take_along_axis(self.turned_each(rows, vectors), self.missing[self.place[rows]], axis=1)

    def of_missing(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """``N'v`` given ``(W v)_M``, (k, u)."""
        return np.matmul(self.factor[self.place[rows]], values[..., None])[..., 0].astype(values.dtype)

    def spread(self, rows: np.ndarray, along: np.ndarray) -> np.ndarray:
        """Vectors s, (k, D), with ``W s = N a`` for the given a, (k, u)."""
        own = self.place[rows]
        found = np.zeros((rows.size, self.num_features), along.dtype)
        np.put_along_axis(found, self.missing[own], np.matmul(along[:, None], self.factor[own])[:, 0], axis=1)
        return found

    def shown(self, rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """What rows show of a vector each, ``v - N N'v``, (k, D)."""
        found = np.array(vectors)
        for some in slices(rows.size, vectors.shape[1] + self.numbers):
            own = rows[some]
            found[some] -= self.turned_each(own, self.spread(own, self.along(own, vectors[some])))
        return found

    def turned_each(self, rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Each row's W times its vector, (k, D)."""
        which = self.which[self.place[rows]]
        out = np.empty_like(vectors)
        for number in np.unique(which):
            inside = which == number
            out[inside] = vectors[inside] @ self.matrix(number, vectors.dtype)
        return out

    def turned(self, row: int, basis: np.ndarray) -> np.ndarray:
        """A row's W times the columns of a basis, (D, d)."""
        return np.asarray(self.matrix(self.which[self.place[row]], basis.dtype) @ basis)

    def matrix(self, number: int, dtype: DTypeLike) -> np.ndarray:
        """The matrix W of this number, for products with vectors of a dtype."""
        return self.rounded[number] if dtype == self.rounded[number].dtype else self.whitenings[number]

    def of_basis(self, rows: np.ndarray, turned: np.ndarray) -> np.ndarray:
        """``N'B`` of the same columns B for rows that were whitened by one matrix, given W B, (D, d): (k, u, d)."""
        own = self.place[rows]
        return np.matmul(self.factor[own], turned[self.missing[own]])

    def squares(self, rows: np.ndarray, there: np.ndarray) -> np.ndarray:
        """``||N'v||^2`` of K vectors for each of some partial rows, given (W v)_M, (k, K, u): (K, k)."""
        found = np.matmul(there, np.swapaxes(self.factor[self.place[rows]], 1, 2))
        return np.square(found).sum(axis=2).T

    def shares(self, rows: np.ndarray, axes: np.ndarray) -> np.ndarray:
        """Sums over rows, whitened by one matrix, of ``||N'a||^2`` for the columns a of `axes`, (D, p): (p,)."""
        whole = np.zeros((axes.shape[0], axes.shape[0]))  # sum of L^{-T} L^{-1} at the features that each row misses
        for own in self.place[rows]:
            at, factor = self.missing[own], self.factor[own]
            whole[at[:, None], at] += factor.T @ factor
        turned = self.turned(rows[0], axes) if rows.size else axes
        return np.asarray(np.einsum("ij,ij->j", turned, whole @ turned))


def numbers_of(is_observed: np.ndarray) -> int:
    """How many numbers :class:`Unseen` holds for rows of these masks, (n, D)."""
    missing = (~is_observed).sum(axis=1)
    return int((missing > 0).sum() * missing.max(initial=0) ** 2)

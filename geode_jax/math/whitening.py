"""Rows with missing features in coordinates where the noise is isotropic, for any noise covariance shared by all nodes.

Rows are ``x = R z`` with z in model coordinates, where the noise is isotropic, and S = R R. With the Cholesky factor
``S_OO = L L'`` of the observed features and ``W = L^{-1}``, the shown coordinates ``W x_O`` are those of z along |O|
orthonormal vectors. So their noise is isotropic again: at a node of centre R mu and basis R Phi they are a low-rank
Gaussian as in :mod:`geode_jax.math.lowrank`, of basis ``W (R Phi)_O``. Where R is the identity, W selects features.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, Observed, cholesky, log_det_of, masked_gram, observe, reduce_shown

Results = TypeVar("Results")


class SharedNoise(eqx.Module):
    """The noise covariance S of all nodes, over the features, and its symmetric root R."""

    root: Float[Array, "D D"]
    covariance: Float[Array, "D D"]

    @classmethod
    def of(cls, root: Float[Array, "D D"]) -> "SharedNoise":
        """The noise of this root."""
        return cls(root, jnp.matmul(root, root, precision=HIGHEST))


class NoiseGivenSeen(NamedTuple):
    """The noise of some features given that of the observed ones: Gaussian of mean ``map' noise_O``.

    `map` has zero rows beyond a mask's observed features; None where the mean is found in another way. `variance` is in
    units of sigma2.
    """

    map: Float[Array, "#b P U"] | None
    variance: Float[Array, "#b U"]


class Whitening(eqx.Module):
    """The matrix W of every mask, with at most P observed features: one mask per row, or one for all rows.

    Where `index` goes beyond a mask's features, `factor`, W, has zero rows and columns. `log_det`: of S_OO.
    """

    index: Int[Array, "#b P"]
    factor: Float[Array, "#b P P"]
    log_det: Float[Array, "#b"]
    noise: SharedNoise

    def taken(self, vectors: Float[Array, "#b D k"]) -> Float[Array, "#b P k"]:
        """The observed part of column vectors over the features, one set per row or one for all rows."""
        size = max(self.index.shape[0], vectors.shape[0])
        index = jnp.broadcast_to(self.index, (size, self.index.shape[1]))
        vectors = jnp.broadcast_to(vectors, (size, *vectors.shape[1:]))
        return jnp.take_along_axis(vectors, index[..., None], axis=1)

    def __call__(self, vectors: Float[Array, "#b D k"]) -> Float[Array, "#b P k"]:
        """Map column vectors over the features, one set per row or one for all rows, to the shown coordinates."""
        return jnp.matmul(self.factor, self.taken(vectors), precision=HIGHEST)

    def rows(self, row: Int[Array, "p"]) -> "Whitening":
        """Those of some rows, in this order."""
        own = row % self.index.shape[0]
        return Whitening(self.index[own], self.factor[own], self.log_det[own], self.noise)

    def noise_at(self, features: Int[Array, "#b U"]) -> NoiseGivenSeen:
        """The noise at the given missing features, which may go beyond the last feature: there it is arbitrary."""
        cross = self.noise.covariance[self.index[:, :, None], features[:, None, :]]
        told = jnp.matmul(self.factor, cross, precision=HIGHEST)
        left = jnp.diagonal(self.noise.covariance)[features] - jnp.sum(jnp.square(told), axis=1)
        back = jnp.matmul(jnp.swapaxes(self.factor, 1, 2), told, precision=HIGHEST)
        return NoiseGivenSeen(back, jnp.maximum(left, 0.0))


class ObservedRows(eqx.Module):
    """Rows, with arbitrary values at missing features, and masks of the observed ones; one mask if all miss the same.

    `whitening` is None where the noise of different features is independent.
    """

    x: Float[Array, "b D"]
    mask: Float[Array, "#b D"]
    whitening: Whitening | None

    @property
    def num_rows(self) -> int:
        """Number of rows, b."""
        return self.x.shape[0]

    @property
    def log_det(self) -> Float[Array, "#b"] | None:
        """Of the noise covariance of the observed features, relative to sigma2; None where it is the identity."""
        return None if self.whitening is None else self.whitening.log_det

    def noise_at(self, features: Int[Array, "#b U"]) -> NoiseGivenSeen | None:
        """The noise at the given missing features; None where that of different features is independent."""
        return None if self.whitening is None else self.whitening.noise_at(features)

    def statistics(self, centre: Float[Array, "D"], basis: Float[Array, "D d"]) -> Observed:
        """Statistics of the rows at one component, with `centre` and `basis` in the coordinates of x."""
        if self.whitening is None:
            return observe(self.x, self.mask, centre, basis)
        return self._reduced(self.whitening(basis[None]), self.x - centre)

    def statistics_at(
        self, centres: Float[Array, "K D"], bases: Float[Array, "K D d"], node: Int[Array, "b"]
    ) -> Observed:
        """Statistics of every row at a component of its own."""
        if self.whitening is None:
            return self._row_by_row(ObservedRows.statistics, centres[node], bases[node])
        return self._reduced(self._along(bases, node), self.x - centres[node])

    def products_at(
        self, centres: Float[Array, "K D"], bases: Float[Array, "K D d"], node: Int[Array, "b"]
    ) -> tuple[Float[Array, "b d d"], Float[Array, "b d"], Float[Array, "b"]]:
        """:meth:`products` of every row at a component of its own."""
        if self.whitening is None:
            return self._row_by_row(ObservedRows.products, centres[node], bases[node])
        return self._products(self._along(bases, node), self.x - centres[node])

    def _row_by_row(
        self, function: Callable[..., Results], centres: Float[Array, "b D"], bases: Float[Array, "b D d"]
    ) -> Results:
        """Of every row with its own mask, at its own component."""

        def of_row(row: Array, centre: Array, basis: Array) -> Results:
            return jax.tree.map(lambda leaf: leaf[0], function(self.rows(row[None]), centre, basis))

        return jax.vmap(of_row)(jnp.arange(self.num_rows), centres, bases)

    def _along(self, bases: Float[Array, "K D d"], node: Int[Array, "b"]) -> Float[Array, "b P d"]:
        """The shown coordinates of a basis for every row."""
        assert self.whitening is not None
        return jnp.matmul(self.whitening.factor, bases[node[:, None], self.whitening.index], precision=HIGHEST)

    def _reduced(self, along: Float[Array, "#b P d"], off: Float[Array, "b D"]) -> Observed:
        """Statistics, given the shown coordinates of the bases and what the rows are off the centres."""
        assert self.whitening is not None
        return reduce_shown(
            self.whitening(off[..., None])[..., 0],
            jnp.matmul(jnp.swapaxes(along, 1, 2), along, precision=HIGHEST),
            self.mask.sum(axis=-1),
            lambda values: jnp.matmul(values[:, None], along, precision=HIGHEST)[:, 0],
            lambda eta: jnp.matmul(along, eta[..., None], precision=HIGHEST)[..., 0],
        )

    def products(
        self, centre: Float[Array, "D"], basis: Float[Array, "D d"]
    ) -> tuple[Float[Array, "#b d d"], Float[Array, "b d"], Float[Array, "b"]]:
        """G, Phi_O'r and ||r||^2 at one component, in the notation of :mod:`geode_jax.math.lowrank`."""
        if self.whitening is None:
            shown = self.mask * (self.x - centre)
            cross = jnp.matmul(shown, basis, precision=HIGHEST)
            return masked_gram(self.mask, basis), cross, jnp.sum(jnp.square(shown), axis=-1)
        return self._products(self.whitening(basis[None]), self.x - centre)

    def _products(self, along: Float[Array, "#b P d"], off: Float[Array, "b D"]) -> tuple[Array, Array, Array]:
        """:meth:`products`, given the shown coordinates of the bases and what the rows are off the centres."""
        assert self.whitening is not None
        shown = self.whitening(off[..., None])
        gram, cross = (jnp.matmul(jnp.swapaxes(along, 1, 2), part, precision=HIGHEST) for part in (along, shown))
        return gram, cross[..., 0], jnp.sum(jnp.square(shown[..., 0]), axis=-1)

    def numbers(self, rank: int) -> int:
        """About how many :meth:`statistics` and :meth:`products` hold for a basis of so many directions."""
        num_rows, num_features = self.x.shape
        num_masks = self.mask.shape[0]
        copies = min(num_masks, 2 * rank) if self.whitening is None else num_masks
        return num_features * (rank * copies + 3 * num_rows)

    def rows(self, index: Int[Array, "p"]) -> "ObservedRows":
        """Some of the rows, in this order."""
        own = index if self.mask.shape[0] > 1 else jnp.zeros(1, int)
        return ObservedRows(self.x[index], self.mask[own], None if self.whitening is None else self.whitening.rows(own))


@partial(quickly_compiled, static_argnames="num_seen")
def observe_rows(
    x: Float[Array, "b D"], mask: Float[Array, "#b D"], noise: SharedNoise | None, *, num_seen: int
) -> ObservedRows:
    """Prepare rows whose masks have at most `num_seen` observed features; x is finite, arbitrary at missing ones."""
    if noise is None:
        return ObservedRows(x, mask, None)
    shown, index = lax.top_k(mask, num_seen)
    covariance = noise.covariance[index[:, :, None], index[:, None, :]]
    identity = jnp.eye(num_seen, dtype=x.dtype)
    factor = cholesky(jnp.where(shown[:, :, None] * shown[:, None, :] > 0, covariance, identity))
    inverse = lax.linalg.triangular_solve(factor, identity * shown[:, None, :], left_side=True, lower=True)
    return ObservedRows(x, mask, Whitening(index, inverse, log_det_of(factor), noise))

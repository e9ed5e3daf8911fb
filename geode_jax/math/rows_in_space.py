"""Rows of many features in coordinates of a space that holds all nodes.

Where the centre of every node is ``S c`` and its basis ``S B``, with orthonormal columns S, (D, p), a complete row is
told from others by its p coordinates and its distance from the space. Of a row observed at O, the nodes need only what
stands on the right, with any fixed coordinates w and ``e = x_O - S_O w``,

    || x_O - S_O v ||^2 = || e ||^2 + 2 (w - v)'S_O'e + (w - v)'S_O'S_O (w - v)      for every v.

So the work of size D is done once for all nodes. With w near the least-squares solution all terms are small; it need
not be exact, and may be anything along what is not observed.

The noise may have a covariance. Rows are then ``x = R z`` with z in model coordinates, where the noise is isotropic and
R is diagonal along S: a deviation for each column, and one for all that is off the space. The same three terms, of the
inverse covariance of the observed noise in place of the identity, serve all nodes as they are in z.
"""

from functools import partial
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, Observed, least_squares, log_det_of, system_factor
from geode_jax.math.whitening import NoiseGivenSeen, ObservedRows

# Deviations within this share of that outside are the same: their excess would be rounding error.
SAME = 1e-3
# Numbers in the copy of a part of the features of S.
NUMBERS_AT_ONCE = 2**24


class SpaceRoot(eqx.Module):
    """The root R of a noise covariance, diagonal along the columns of S.

    `deviation`: along these, the first `num_axes` of them larger than that of the others and of all that is off the
    space, `outside`.
    """

    deviation: Float[Array | np.ndarray, "p"]
    outside: Float[Array | np.ndarray, ""]
    num_axes: int = eqx.field(static=True)

    @property
    def excess(self) -> Float[Array, "r"]:
        """``g = (d^2 - 1)^(1/2)`` along the columns of larger deviation, with d the ratio to that outside."""
        ratio = self.deviation[: self.num_axes] / self.outside
        return jnp.sqrt((ratio - 1.0) * (ratio + 1.0))

    @property
    def ratio(self) -> Float[Array, "r"]:
        """``d / g``."""
        return jnp.asarray(self.deviation[: self.num_axes]) / (self.outside * self.excess)


class Space(eqx.Module):
    """A space that holds all nodes, with `axes` S, and the `root` of the noise covariance; None is the identity."""

    axes: Float[Array, "D p"]
    root: SpaceRoot | None = None

    @classmethod
    def of(cls, axes: Float[Array, "D p"], deviation: np.ndarray | None) -> "Space":
        """With a root of determinant 1; deviations that are all the same are those of the identity."""
        if deviation is None:
            return cls(axes)
        outside = outside_deviation(deviation, axes.shape[0])
        number = int((deviation > (1.0 + SAME) * outside).sum())
        if number == 0:
            return cls(axes)
        return cls(axes, SpaceRoot(deviation.astype(axes.dtype), np.asarray(outside, axes.dtype), number))

    @jax.jit
    def coordinates(self, x: Float[Array, "n D"]) -> Float[Array, "n p1"]:
        """Coordinates z of complete rows, along the columns, and last the distance from the space."""
        along = jnp.matmul(x, self.axes, precision=HIGHEST)
        rest = x - jnp.matmul(along, self.axes.T, precision=HIGHEST)
        squared = jnp.sum(jnp.square(rest), axis=-1, keepdims=True)
        # the root has no derivative at 0, where that of the square is 0
        distance = jnp.where(squared > 0.0, jnp.sqrt(jnp.where(squared > 0.0, squared, 1.0)), 0.0)
        if self.root is not None:
            along, distance = along / self.root.deviation, distance / self.root.outside
        return jnp.concatenate([along, distance], axis=-1)

    def coloured(self, along: Float[Array, "*m p"]) -> Float[Array, "*m p"]:
        """Coordinates of x, given those of z."""
        return along if self.root is None else along * self.root.deviation

    def features(self, z: Float[Array, "*m p1"]) -> Float[Array, "*m D"]:
        """Points of the space at all features."""
        return jnp.matmul(self.coloured(z[..., :-1]), self.axes.T, precision=HIGHEST)

    def noise(self, normal: Float[Array, "*m D"]) -> Float[Array, "*m D"]:
        """R times these."""
        if self.root is None:
            return normal
        along = jnp.matmul(normal, self.axes, precision=HIGHEST) * (self.root.deviation - self.root.outside)
        return jnp.multiply(self.root.outside, normal) + jnp.matmul(along, self.axes.T, precision=HIGHEST)

    def noise_variance(self) -> Float[Array, "#D"]:
        """The diagonal of R R."""
        if self.root is None:
            return jnp.ones(1, self.axes.dtype)
        more = jnp.square(self.root.deviation) - jnp.square(self.root.outside)
        of_axes = jnp.matmul(jnp.square(self.axes), jnp.asarray(more), precision=HIGHEST)
        return jnp.asarray(jnp.square(self.root.outside) + of_axes)


def outside_deviation(deviation: Float[np.ndarray, "p"], num_features: int) -> float:
    """The deviation off the space of a root of determinant 1."""
    return float(np.exp(-np.log(deviation.astype(np.float64)).sum() / (num_features - deviation.size)))


class GivenSeen(eqx.Module):
    """What the noise of the observed features, off a point v of the space, tells of the noise of z along the space.

    Along the columns of larger deviation that has the mean ``(told (w - v) + base) / ratio``, and the covariance
    ``spread'spread / ratio^2`` in units of sigma2; along the others it is not told of.
    """

    told: Float[Array, "#b r p"]
    base: Float[Array, "b r"]
    spread: Float[Array, "#b r r"]
    log_det: Float[Array, "#b"]

    def of_row(self, row: Int[Array, ""]) -> "GivenSeen":
        """That of one row, without its axis."""
        return jax.tree.map(lambda leaf: leaf[row % leaf.shape[0]], self)


class RowsInSpace(eqx.Module):
    """What the observed part of rows tells of coordinates in the space: with `mask` (1, D) if all miss the same.

    `gram`: S_O'S_O. `own`: w. `pull`: S_O'e. `rest`: ||e||^2. With a noise covariance these are of z, and `given` says
    what the observed noise tells of the rest. The methods are those of
    :class:`geode_jax.math.whitening.ObservedRows`; centres and bases have a last coordinate, of zeros.
    """

    space: Space
    mask: Float[Array, "#b D"]
    gram: Float[Array, "#b p p"]
    own: Float[Array, "b p"]
    pull: Float[Array, "b p"]
    rest: Float[Array, "b"]
    given: GivenSeen | None = None
    whitening: None = None

    @property
    def log_det(self) -> Float[Array, "#b"] | None:
        """Of the noise covariance of the observed features, relative to sigma2; None where it is the identity."""
        return None if self.given is None else self.given.log_det

    @property
    def num_rows(self) -> int:
        """Number of rows, b."""
        return self.own.shape[0]

    def noise_at(self, features: Int[Array, "#b U"]) -> NoiseGivenSeen | None:
        """The noise at the given missing features: its mean is that along the columns of S, and has no map here."""
        root, axes = self.space.root, self.space.axes
        if self.given is None or root is None:
            return None
        number, excess = self.given.spread.shape[0], root.excess

        def of_row(row: tuple[Array, Array]) -> Array:
            own = axes[row[0], : root.num_axes] * excess
            return 1.0 + jnp.sum(jnp.square(jnp.matmul(own, row[1].T, precision=HIGHEST)), axis=-1)

        # copies U r numbers: one row at a time
        index = jnp.broadcast_to(features, (number, features.shape[1]))
        return NoiseGivenSeen(None, jnp.square(root.outside) * lax.map(of_row, (index, self.given.spread)))

    def products(
        self, centre: Float[Array, "*#b p1"], basis: Float[Array, "*#b p1 d"]
    ) -> tuple[Float[Array, "#b d d"], Float[Array, "b d"], Float[Array, "b"]]:
        """G, Phi_O'r and ||r||^2 at one component, in the notation of :mod:`geode_jax.math.lowrank`."""
        found = self._at(centre, basis)
        return found.gram, found.cross(), found.squared()

    def statistics(self, centre: Float[Array, "*#b p1"], basis: Float[Array, "*#b p1 d"]) -> Observed:
        """Statistics of the rows at one component."""
        at = self._at(centre, basis)
        cross = at.cross()
        start = least_squares(at.gram, cross)
        left = at.moved(start)
        number = jnp.broadcast_to(self.mask.sum(axis=-1), self.rest.shape)
        return Observed(at.gram, cross, start, left.cross(), left.squared(), number)

    def statistics_at(
        self, centres: Float[Array, "K p1"], bases: Float[Array, "K p1 d"], node: Int[Array, "b"]
    ) -> Observed:
        """Statistics of every row at a component of its own."""
        return self.statistics(centres[node], bases[node])

    def products_at(
        self, centres: Float[Array, "K p1"], bases: Float[Array, "K p1 d"], node: Int[Array, "b"]
    ) -> tuple[Float[Array, "b d d"], Float[Array, "b d"], Float[Array, "b"]]:
        """:meth:`products` of every row at a component of its own."""
        return self.products(centres[node], bases[node])

    def numbers(self, rank: int) -> int:
        """About how many :meth:`statistics` and :meth:`products` hold for a basis of so many directions."""
        return self.own.shape[1] * (self.gram.shape[0] * rank + 3 * self.num_rows)

    def _at(self, centre: Array, basis: Array) -> "_AtComponent":
        basis = basis[..., :-1, :]
        along = jnp.matmul(self.gram, basis, precision=HIGHEST)
        gram = jnp.matmul(jnp.swapaxes(basis, -1, -2), along, precision=HIGHEST)
        return _AtComponent(self, basis, along, gram, self.own - centre[..., :-1])


class _AtComponent(eqx.Module):
    """The rows at one component: with `off`, coordinates from its points to the rows' own, ``r = S_O off + e``."""

    seen: RowsInSpace
    basis: Float[Array, "*#b p d"]
    along: Float[Array, "#b p d"]
    gram: Float[Array, "#b d d"]
    off: Float[Array, "b p"]

    def moved(self, eta: Float[Array, "b d"]) -> "_AtComponent":
        """From the point of the component with these coordinates along its basis."""
        step = jnp.matmul(eta[:, None], jnp.swapaxes(self.basis, -1, -2), precision=HIGHEST)[:, 0]
        return eqx.tree_at(lambda it: it.off, self, self.off - step)

    def cross(self) -> Float[Array, "b d"]:
        """Phi_O'r."""
        pulled = jnp.matmul(self.off[:, None], self.along, precision=HIGHEST)[:, 0]
        return pulled + jnp.matmul(self.seen.pull[:, None], self.basis, precision=HIGHEST)[:, 0]

    def squared(self) -> Float[Array, "b"]:
        """||r||^2."""
        bent = jnp.matmul(self.off[:, None], self.seen.gram, precision=HIGHEST)[:, 0]
        found = self.seen.rest + jnp.sum(self.off * (2.0 * self.seen.pull + bent), axis=-1)
        return jnp.maximum(found, 0.0)


# Rows with missing features, over the features or in a space.
SeenRows: TypeAlias = ObservedRows | RowsInSpace


@partial(quickly_compiled, static_argnames="num_seen")
def observe_in_space(x: Float[Array, "b D"], mask: Float[Array, "#b D"], space: Space, *, num_seen: int) -> RowsInSpace:
    """Reduce rows with at most `num_seen` observed features each; x is finite, arbitrary at missing ones.

    Where few features are missing, ``I - S_M'S_M`` would be less work, but the products of a direction that is not seen
    would be zero only to within the rounding error of 1.
    """
    gram = _gram_of(mask, space.axes, num_seen)
    shown = mask * x
    own = least_squares(gram, jnp.matmul(shown, space.axes, precision=HIGHEST))
    error = shown - mask * jnp.matmul(own, space.axes.T, precision=HIGHEST)
    pull = jnp.matmul(error, space.axes, precision=HIGHEST)
    seen = RowsInSpace(space, mask, gram, own, pull, jnp.sum(jnp.square(error), axis=-1))
    return seen if space.root is None else _whitened(seen, space.root)


def _whitened(seen: RowsInSpace, root: SpaceRoot) -> RowsInSpace:
    """Rows of x in terms of z, with the inverse covariance of their noise in place of the identity.

    In units of the deviation outside, the noise of the observed features has the covariance ``I + S_J g^2 S_J'`` at O,
    with J the columns of larger deviation d. With H the Gram matrix and ``M = I + g H_JJ g``, whose inverse all follows
    from, no term is a difference of much larger ones where features enough are seen: that of J with itself is
    ``(d/g) (I - M^{-1}) (d/g)``. Of directions that are not seen it is zero to within rounding
    (`predict/distance.py`).
    """
    r, excess, ratio, outside = root.num_axes, root.excess, root.ratio, root.outside
    gram, pull = seen.gram, seen.pull / outside
    identity = jnp.eye(r, dtype=gram.dtype)
    # raised by as much as for hundreds of terms, directions that are not seen would count as seen, if little
    factor = system_factor(gram[:, :r, :r], excess, seen.own, terms=0)
    spread = lax.linalg.triangular_solve(factor, jnp.broadcast_to(identity, factor.shape), left_side=True, lower=True)
    inverse = jnp.matmul(jnp.swapaxes(spread, 1, 2), spread, precision=HIGHEST)
    other = excess[:, None] * gram[:, :r, r:]  # g H_JF, with F the other columns
    across = jnp.matmul(inverse, other, precision=HIGHEST)
    among = identity - inverse
    base = jnp.matmul((excess * pull[:, :r])[:, None], inverse, precision=HIGHEST)[:, 0]  # M^{-1} g S_J'e
    beside = ratio[:, None] * across
    rest = gram[:, r:, r:] - jnp.matmul(jnp.swapaxes(other, 1, 2), across, precision=HIGHEST)
    pulled = jnp.matmul(base[:, None], other, precision=HIGHEST)[:, 0]
    return RowsInSpace(
        space=seen.space,
        mask=seen.mask,
        gram=jnp.block([[ratio[:, None] * among * ratio, beside], [jnp.swapaxes(beside, 1, 2), rest]]),
        own=seen.own / root.deviation,
        pull=jnp.concatenate([ratio * base, pull[:, r:] - pulled], axis=1),
        rest=seen.rest / jnp.square(outside) - jnp.sum(base * excess * pull[:, :r], axis=1),
        given=GivenSeen(
            told=jnp.concatenate([among * ratio, across], axis=2),
            base=base,
            spread=spread,
            log_det=2.0 * seen.mask.sum(axis=-1) * jnp.log(outside) + log_det_of(factor),
        ),
    )


def _gram_of(mask: Float[Array, "b D"], space: Float[Array, "D p"], num_seen: int) -> Float[Array, "b p p"]:
    """Inner products of the columns of S over the features that each row shows, at most so many.

    They are gathered a part at a time: with all of them a row's copy would be as large as S.
    """
    shown, index = lax.top_k(mask, num_seen)
    size = min(num_seen, max(1, NUMBERS_AT_ONCE // space.shape[1]))

    def of_row(row: tuple[Array, Array]) -> Array:
        def add(number: Array, total: Array) -> Array:
            # the last part begins earlier, and leaves out what the one before it had
            start = jnp.minimum(number * size, num_seen - size)
            weight, some = (lax.dynamic_slice_in_dim(whole, start, size) for whole in row)
            part = space[some] * (weight * (start + jnp.arange(size) >= number * size))[:, None]
            return total + jnp.matmul(part.T, part, precision=HIGHEST)

        return lax.fori_loop(0, -(-num_seen // size), add, jnp.zeros((space.shape[1],) * 2, space.dtype))

    return lax.map(of_row, (shown, index))

"""Rows of many features in coordinates of a space that holds all nodes.

Where the centre of every node is ``S c`` and its basis ``S B``, with orthonormal columns S, (D, p), a complete row is
told from others by its p coordinates and its distance from the space. Of a row observed at O, the nodes need only what
stands on the right, with any fixed coordinates w and ``e = x_O - S_O w``,

    || x_O - S_O v ||^2 = || e ||^2 + 2 (w - v)'S_O'e + (w - v)'S_O'S_O (w - v)      for every v.

So the work of size D is done once for all nodes. With w near the least-squares solution all terms are small; it need
not be exact, and may be anything along what is not observed.
"""

from functools import partial
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array, Float, Int
from geode_jax.math.lowrank import HIGHEST, Observed, least_squares
from geode_jax.math.whitening import ObservedRows

# Numbers in the copy of a part of the features of S.
NUMBERS_AT_ONCE = 2**24


@jax.jit
def space_coordinates(space: Float[Array, "D p"], x: Float[Array, "n D"]) -> Float[Array, "n p1"]:
    """Coordinates of complete rows, and last their distance from the space."""
    along = jnp.matmul(x, space, precision=HIGHEST)
    rest = x - jnp.matmul(along, space.T, precision=HIGHEST)
    squared = jnp.sum(jnp.square(rest), axis=-1, keepdims=True)
    # the root has no derivative at 0, where that of the square is 0
    distance = jnp.where(squared > 0.0, jnp.sqrt(jnp.where(squared > 0.0, squared, 1.0)), 0.0)
    return jnp.concatenate([along, distance], axis=-1)


class RowsInSpace(eqx.Module):
    """What the observed part of rows tells of coordinates in the space: with `mask` (1, D) if all miss the same.

    `gram`: S_O'S_O. `own`: w. `pull`: S_O'e. `rest`: ||e||^2. The methods are those of
    :class:`geode_jax.math.whitening.ObservedRows`; centres and bases have a last coordinate, of zeros.
    """

    space: Float[Array, "D p"]
    mask: Float[Array, "#b D"]
    gram: Float[Array, "#b p p"]
    own: Float[Array, "b p"]
    pull: Float[Array, "b p"]
    rest: Float[Array, "b"]
    whitening: None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, b."""
        return self.own.shape[0]

    def features(self, coordinates: Float[Array, "*m p1"]) -> Float[Array, "*m D"]:
        """Points of the space at all features."""
        return jnp.matmul(coordinates[..., :-1], self.space.T, precision=HIGHEST)

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
def observe_in_space(
    x: Float[Array, "b D"], mask: Float[Array, "#b D"], space: Float[Array, "D p"], *, num_seen: int
) -> RowsInSpace:
    """Reduce rows with at most `num_seen` observed features each; x is finite, arbitrary at missing ones.

    Where few features are missing, ``I - S_M'S_M`` would be less work, but the products of a direction that is not seen
    would be zero only to within the rounding error of 1.
    """
    gram = _gram_of(mask, space, num_seen)
    shown = mask * x
    own = least_squares(gram, jnp.matmul(shown, space, precision=HIGHEST))
    error = shown - mask * jnp.matmul(own, space.T, precision=HIGHEST)
    pull = jnp.matmul(error, space, precision=HIGHEST)
    return RowsInSpace(space, mask, gram, own, pull, jnp.sum(jnp.square(error), axis=-1))


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

"""A low-rank Gaussian given some observed features, without cancellation and with work of size d per draw.

y ~ N(mu, sigma2 (Phi diag(s) Phi' + I)) with s = alpha2 / sigma2, observed at O. Let G = Phi_O'Phi_O, r = y_O - mu_O,
and eta0 any fixed coordinates, e0 = r - Phi_O eta0. The coordinates given y_O are Gaussian,

    eta | y_O ~ N( eta*, sigma2 V ),   V = (G + diag(1/s))^{-1} = a M^{-1} a,   M = I + a G a,   a = diag(sqrt(s)),

and with v = eta0 - eta* the quadratic form is a sum of terms that are not larger than it in order of magnitude,

    r'(Phi_O diag(s) Phi_O' + I)^{-1} r = ||e0||^2 + 2 v'Phi_O'e0 + v'G v + eta*' diag(1/s) eta*,

where ``||r||^2 - C'(..)C`` (Woodbury as usually written) subtracts two large terms. The form is stationary at eta*, so
the rounding error of eta* enters squared. M has eigenvalues of at least 1, but where s is beyond the precision's
resolution the rounding error of G counts for more than that. So G's diagonal is raised by what that error may be
beyond 1/s, and M as a whole always has a Cholesky factor. What is added counts as observed, also along directions that
no observed feature shows; up to :func:`largest_signal` nothing is added.

On CPU, jaxlib's batched Cholesky and triangular solve split their batch over XLA's thread pool and block the calling
thread. Two calls that do not depend on each other may run at once, block all threads of a small pool, and deadlock
(seen with jaxlib 0.10.2 on 2 cores). So every function here is one chain of dependent calls, and callers must not run
two chains in parallel. A loop does not keep two chains apart, as XLA removes loops of one round. Where the second chain
does not depend on the first, :func:`_one_after` makes it: a factor of 1 that XLA cannot compute in advance.
`tests/test_lapack_chain.py` looks at what XLA has compiled. `_runtime/blas.py` says what else blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._typing import Array, DTypeLike, Float

HIGHEST = lax.Precision.HIGHEST  # a GPU would otherwise multiply float32 matrices with 10-bit mantissas
# On a CPU `inverse_factor` leaves matrices of at most this size to LAPACK, and of larger ones at most so many blocks.
LEAF, LEAVES = 16, 8
# A column of the inverse of a factor whose square is longer than this is wrong by more than its rounding.
LONGEST = 1.01


class Observed(NamedTuple):
    """Statistics of a partially observed row at one component; leading axes are batch axes.

    `gram`: G. `cross`: Phi_O'r. `start`: eta0. `remainder`: Phi_O'e0. `residual`: ||e0||^2. `num_observed`: |O|.
    The first axis of `gram` has length 1 where all rows miss the same features.
    """

    gram: Float[Array, "*#batch d d"]
    cross: Float[Array, "*#batch d"]
    start: Float[Array, "*#batch d"]
    remainder: Float[Array, "*#batch d"]
    residual: Float[Array, "*#batch"]
    num_observed: Float[Array, "*#batch"]


class Latent(NamedTuple):
    """The coordinates along the basis given the observed part: mean eta*, and log det M."""

    mean: Float[Array, "*#batch d"]
    log_det: Float[Array, "*#batch"]


def observe(
    x: Float[Array, "b D"],
    is_observed: Float[Array, "#b D"],
    centre: Float[Array, "D"],
    basis: Float[Array, "D d"],
) -> Observed:
    """Reduce partial rows to statistics of size d at one component.

    `is_observed` holds ones and zeros; it has a single row if all rows miss the same features, and the Gram matrix is
    then computed once. `x` is finite, with arbitrary values at missing entries.
    """
    return reduce_shown(
        is_observed * (x - centre),
        masked_gram(is_observed, basis),
        is_observed.sum(axis=-1),
        lambda values: jnp.matmul(values, basis, precision=HIGHEST),
        lambda eta: is_observed * jnp.matmul(eta, basis.T, precision=HIGHEST),
    )


def reduce_shown(
    shown: Float[Array, "b p"],
    gram: Float[Array, "#b d d"],
    num_observed: Float[Array, "#b"],
    along: Callable[[Array], Array],
    back: Callable[[Array], Array],
) -> Observed:
    """:func:`observe` for the observed part of the rows' differences from the centre, with isotropic noise.

    `along` multiplies such values by the observed part of the basis, (b, p) to (b, d), and `back` is its transpose.
    """
    cross = along(shown)
    start = least_squares(gram, cross)
    error = shown - back(start)
    return Observed(
        gram=gram,
        cross=cross,
        start=start,
        remainder=along(error),
        residual=jnp.sum(jnp.square(error), axis=-1),
        num_observed=jnp.broadcast_to(num_observed, shown.shape[:1]),
    )


def least_squares(gram: Float[Array, "#b d d"], cross: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Coordinates of the observed part along the basis; where the basis is not seen, they are near 0."""
    return solve_factored(_ridged_factor(gram), cross)


def orthonormal(basis: Float[Array, "D d"]) -> Float[Array, "D d"]:
    """Nearly orthonormal columns of the same span; columns of zeros stay so."""
    factor = _ridged_factor(jnp.matmul(basis.T, basis, precision=HIGHEST))
    return lax.linalg.triangular_solve(factor, basis.T, left_side=True, lower=True).T


def masked_gram(mask: Float[Array, "b D"], basis: Float[Array, "D d"]) -> Float[Array, "b d d"]:
    """Inner products of the basis' columns over the features of each mask."""
    num_features, rank = basis.shape
    if mask.shape[0] <= 2 * rank:
        # masked copies of the basis are fewer than products of its columns
        masked = (mask[:, None, :] * basis.T).reshape(-1, num_features)
        return jnp.matmul(masked, basis, precision=HIGHEST).reshape(-1, rank, rank)
    products = (basis[:, :, None] * basis[:, None, :]).reshape(num_features, -1)
    return jnp.matmul(mask, products, precision=HIGHEST).reshape(-1, rank, rank)


def _ridged_factor(gram: Float[Array, "*#batch d d"]) -> Float[Array, "*#batch d d"]:
    """Cholesky factor of a Gram matrix that may be singular."""
    return cholesky(gram + ridge_of(gram.dtype) * jnp.eye(gram.shape[-1], dtype=gram.dtype))


def ridge_of(dtype: DTypeLike) -> float:
    """Added to the diagonal of a Gram matrix that may be singular, so that it has a Cholesky factor."""
    return 1e-5 if dtype == jnp.float32 else 1e-10


def solve_factored(factor: Float[Array, "*#batch d d"], right: Float[Array, "*#batch d"]) -> Float[Array, "*#batch d"]:
    """Solve ``L L' x = right``; all along the first axis have the same L if that of `factor` has length 1."""
    if factor.shape[0] == 1 < right.shape[0] and right.ndim > 1:
        return jnp.moveaxis(_solve_columns(factor[0], jnp.moveaxis(right, 0, -1)), -1, 0)
    return _solve_columns(factor, right[..., None])[..., 0]


def _solve_columns(factor: Float[Array, "*batch d d"], right: Float[Array, "*batch d k"]) -> Float[Array, "*batch d k"]:
    half = lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)
    return lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)


def cholesky(matrix: Float[Array, "*#batch d d"]) -> Float[Array, "*#batch d d"]:
    """Cholesky factor of symmetric matrices as they are: a symmetrised copy would cost a third."""
    return lax.linalg.cholesky(matrix, symmetrize_input=False)


def posterior_system(
    gram: Float[Array, "*#batch d d"],
    neg_log_u: Float[Array, "*#batch d"],
    after: Float[Array, "*#batch d"] | None = None,
) -> tuple[Float[Array, "*#batch d"], Float[Array, "*#batch d d"]]:
    """(a, Cholesky factor of M), with s = expm1(-log u). `after`: what another chain of calls gives, which comes first.

    It has the batch axes of `gram`, or is longer where these have length 1.
    """
    amplitude = jnp.sqrt(jnp.expm1(neg_log_u))
    return amplitude, system_factor(gram, amplitude, after)


def system_factor(
    gram: Float[Array, "*#batch d d"],
    amplitude: Float[Array, "*#batch d"],
    after: Float[Array, "*#batch _"] | None = None,
    terms: int | None = None,
) -> Float[Array, "*#batch d d"]:
    """Cholesky factor of ``M = I + a G a``, with a the amplitudes; `after` as in :func:`posterior_system`.

    `terms`: G's diagonal may be raised by the rounding error of a matrix of this size; None is d.
    """
    return cholesky(_system(gram, amplitude, after, terms))


def _one_after(values: Float[Array, "*batch d"], shape: tuple[int, ...]) -> Float[Array, "*#batch"]:
    """1, which XLA cannot compute before it has the values; `shape`: (*#batch,)."""
    first = values[..., 0]
    for axis, size in enumerate(shape):
        if size == 1:
            first = lax.slice_in_dim(first, 0, 1, axis=axis)
    info = jnp.finfo(values.dtype)
    return 1.0 + jnp.where(first == info.max, info.tiny, jnp.zeros((), values.dtype))


def _system(
    gram: Float[Array, "*#batch d d"],
    amplitude: Float[Array, "*#batch d"],
    after: Float[Array, "*#batch _"] | None = None,
    terms: int | None = None,
) -> Float[Array, "*#batch d d"]:
    """M, with G's diagonal raised by what its rounding error may be more than 1/s."""
    one = 1.0 if after is None else _one_after(after, gram.shape[:-2])[..., None, None]
    rank, dtype = amplitude.shape[-1], amplitude.dtype
    identity = jnp.eye(rank, dtype=dtype)
    terms = rank if terms is None else terms
    # from 0 at the largest signal, to the most that rounding may do where a row shows one feature of many directions
    share = 1.0 - largest_signal(terms, dtype) / jnp.square(amplitude)
    more = (4.0 + terms) * jnp.finfo(dtype).eps * jnp.maximum(share, 0.0)
    raised = gram * (1.0 + more[..., None, :] * identity)
    return amplitude[..., :, None] * raised * amplitude[..., None, :] + one * identity


def largest_signal(rank: int, dtype: DTypeLike) -> float:
    """The largest s up to which 1/s is more than the rounding error of G, relative to its diagonal.

    Errors of different entries are independent, so that the norm of their matrix mostly grows as the root of its size.
    (Without any raising, factors were seen to fail beyond s = 1e7.) Up to here standard deviations along directions
    that no feature shows are right to some 2%, in float32.
    """
    return float(1.0 / ((4.0 + np.sqrt(rank)) * jnp.finfo(dtype).eps))


def latent_given(observed: Observed, neg_log_u: Float[Array, "*#batch d"]) -> Latent:
    """Mean of the coordinates given the observed part, for :func:`log_marginal`."""
    return latent_from(*posterior_system(observed.gram, neg_log_u, observed.start), observed.cross)


def rough_log_marginal(
    gram: Float[Array, "*#batch d d"],
    cross: Float[Array, "*#batch d"],
    squared_norm: Float[Array, "*#batch"],
    num_observed: Float[Array, "*#batch"],
    neg_log_u: Float[Array, "*#batch d"],
    log_sigma2: Float[Array, "*#batch"],
) -> Float[Array, "*#batch"]:
    """:func:`log_marginal` by Woodbury's formula as usually written: fast for small d, but not safe from cancellation.

    `squared_norm`: ||r||^2. One Cholesky factor gives all: that of M with a C as another row has L^{-1} a C there.
    """
    amplitude = jnp.sqrt(jnp.expm1(neg_log_u))
    row = amplitude * cross
    system = jnp.broadcast_to(_system(gram, amplitude), (*row.shape, row.shape[-1]))
    # any corner above ||a C||^2 has a factor, as M is at least 1; twice that is so in spite of rounding
    last = jnp.concatenate([row, 1.0 + 2.0 * jnp.sum(jnp.square(row), axis=-1, keepdims=True)], axis=-1)
    bordered = jnp.concatenate([jnp.concatenate([system, row[..., None]], axis=-1), last[..., None, :]], axis=-2)
    factor = cholesky(bordered)
    log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)[..., :-1]), axis=-1)
    quadratic = squared_norm - jnp.sum(jnp.square(factor[..., -1, :-1]), axis=-1)
    return _log_normal(quadratic, log_det, num_observed, log_sigma2)


def latent_from(
    amplitude: Float[Array, "*#batch d"], factor: Float[Array, "*#batch d d"], cross: Float[Array, "*#batch d"]
) -> Latent:
    """:func:`latent_given` for a system that is already factored."""
    return Latent(amplitude * solve_factored(factor, amplitude * cross), log_det_of(factor))


def latent_root(observed: Observed, neg_log_u: Float[Array, "*#batch d"]) -> tuple[Latent, Float[Array, "*#batch d d"]]:
    """:func:`latent_given` and a root H of the coordinates' covariance given the observed part, ``V = H'H``.

    H = L^{-1} diag(a) with L L' = M, and eta* = H'H C.
    """
    amplitude = jnp.sqrt(jnp.expm1(neg_log_u))
    inverse = inverse_factor(_system(observed.gram, amplitude, observed.start))
    root = inverse * amplitude[..., None, :]
    along = jnp.einsum("...ki,...i->...k", root, observed.cross, precision=HIGHEST)
    mean = jnp.einsum("...ki,...k->...i", root, along, precision=HIGHEST)
    return Latent(mean, -log_det_of(inverse)), root


def inverse_factor(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Inverse of the Cholesky factor of each matrix; all of these are the identity plus a positive semidefinite one.

    On a CPU, products of matrices use all cores. A core that waits for LAPACK is idle, and small matrices take it long
    for their size; so only blocks along the diagonal are factored by it.
    """
    if matrix.shape[-1] <= LEAF:
        return _inverse_by_lapack(matrix)
    return lax.platform_dependent(matrix, cpu=_inverse_on_cpu, default=_inverse_by_lapack)


def _inverse_on_cpu(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """By blocks, and once more by LAPACK where that fails.

    Variances far beyond the precision may leave a block without a factor, and all after it NaN, or with a wrong one:
    columns of the inverse are no longer than 1, as the matrices are at least the identity.
    """
    found = _inverse_by_blocks(matrix)
    is_right = (jnp.sum(jnp.square(found), axis=-2) <= LONGEST).all(axis=-1)  # False for NaN, which XLA's maximum loses
    after = _one_after(found[..., -1, :], matrix.shape[:-2])[..., None, None]

    def again() -> Array:
        return jnp.where(is_right[..., None, None], found, _inverse_by_lapack(after * matrix))

    return lax.cond(is_right.all(), lambda: found, again)


def _inverse_by_lapack(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return lax.linalg.triangular_solve(cholesky(matrix), identity, left_side=True, lower=True)


def _inverse_by_blocks(matrix: Float[Array, "*batch n n"], parts: int = LEAVES) -> Float[Array, "*batch n n"]:
    """With M = [[A, B'], [B, C]] and K, N those of A and of C - W W', W = B K': [[K, 0], [-N W K, N]]."""
    size = matrix.shape[-1]
    if size <= LEAF or parts == 1:
        return _inverse_by_lapack(matrix)
    half = (size + 1) // 2
    first = _inverse_by_blocks(matrix[..., :half, :half], parts // 2)
    beside = jnp.matmul(matrix[..., half:, :half], jnp.swapaxes(first, -1, -2), precision=HIGHEST)
    left = matrix[..., half:, half:] - jnp.matmul(beside, jnp.swapaxes(beside, -1, -2), precision=HIGHEST)
    second = _inverse_by_blocks(left, parts // 2)
    across = jnp.matmul(second, jnp.matmul(beside, first, precision=HIGHEST), precision=HIGHEST)
    above = jnp.concatenate([first, jnp.zeros_like(jnp.swapaxes(across, -1, -2))], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([-across, second], axis=-1)], axis=-2)


def log_det_of(factor: Float[Array, "*#batch d d"]) -> Float[Array, "*#batch"]:
    """Log determinant of the matrix with this Cholesky factor."""
    return 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), axis=-1)


def log_marginal(
    observed: Observed,
    latent: Latent,
    neg_log_u: Float[Array, "*#batch d"],
    log_sigma2: Float[Array, "*#batch"],
) -> Float[Array, "*#batch"]:
    """Log N(y_O) (the paper's A2, with the squared norm)."""
    off = observed.start - latent.mean
    # eta' diag(1/s) eta, with eta = 0 where s = 0
    snr = jnp.expm1(neg_log_u)
    prior_term = jnp.sum(jnp.where(snr > 0, jnp.square(latent.mean) / jnp.where(snr > 0, snr, 1.0), 0.0), axis=-1)
    bend = jnp.einsum("...i,...ij,...j->...", off, observed.gram, off, precision=HIGHEST)
    quadratic = observed.residual + 2.0 * jnp.sum(off * observed.remainder, axis=-1) + bend + prior_term
    return _log_normal(quadratic, latent.log_det, observed.num_observed, log_sigma2)


def _log_normal(quadratic: Array, log_det: Array, num_observed: Array, log_sigma2: Array) -> Array:
    """Log density of a normal of covariance sigma2 C; `quadratic` and `log_det` are those of C."""
    log_two_pi = jnp.log(2 * jnp.pi).astype(log_sigma2.dtype)
    return -0.5 * (num_observed * (log_two_pi + log_sigma2) + log_det + jnp.exp(-log_sigma2) * quadratic)

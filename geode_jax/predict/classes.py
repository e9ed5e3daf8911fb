"""Class probabilities: posterior predictive densities of the classes, weighted by their prior probabilities."""

import jax
import numpy as np
from scipy import special

from geode_jax._checks import check_data, check_instance, check_integer
from geode_jax._runtime.blas import one_blas_thread
from geode_jax._runtime.devices import everywhere, mesh_of
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import ArrayLike, Float
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.predict.class_span import bytes_per_row as reduced_row_bytes
from geode_jax.predict.class_span import log_density_reduced, show
from geode_jax.predict.density import density_row_bytes, log_densities
from geode_jax.predict.distance import by_distance
from geode_jax.predict.mixture import log_densities_partial
from geode_jax.predict.nodes import Nodes
from geode_jax.predict.row_blocks import map_row_blocks
from geode_jax.predict.rows import (
    CANDIDATES,
    in_row_space,
    map_partial_rows,
    partial_row_bytes,
    thinned,
    without_empty,
)
from geode_jax.rows.blocks import slices
from geode_jax.rows.frame import to_model

# Draws per tree. Few are enough, as a class density is averaged over trees too; for a partial row every draw costs a
# Cholesky factor.
CLASS_DRAWS = 20
PARTIAL_CLASS_DRAWS = 4
# Densities under every draw that are held at once.
NUMBERS_AT_ONCE = 2**22


def class_log_densities(
    posterior: ClassPosterior, X: ArrayLike, *, num_draws: int | None = None, num_candidates: int | None = None
) -> Float[np.ndarray, "n G T"]:
    """Log density of rows (n, D) under every draw of every tree of every class, in nats and the data's units.

    T counts the draws of all trees, in the same order for every class. A row with NaN gets the marginal log density of
    its observed entries. Features that never varied in the training rows are left out.

    - `num_draws`: posterior draws per tree, rounded up to a multiple of the number of chains. None: 20, or 4 for all
      rows if any has NaN.
    - `num_candidates`: nodes per tree that are considered for a row with NaN under all draws; the weight of the others
      counts as it is at the posterior mean of the parameters. None: 6.
    """
    check_instance(posterior, "posterior", ClassPosterior)
    data = check_data(X, "X", allow_nan=True, num_features=posterior.num_features)
    if num_draws is not None:
        check_integer(num_draws, "num_draws", 1)
    wanted = CANDIDATES if num_candidates is None else check_integer(num_candidates, "num_candidates", 1)
    varying = posterior.varying_features
    is_partial = np.isnan(data[:, varying]).any(axis=1)
    # complete and partial rows of one call get the same draws: the smaller number
    num_draws = num_draws or (PARTIAL_CLASS_DRAWS if is_partial.any() else CLASS_DRAWS)
    num_draws = min(num_draws, *(member.num_chains * member.num_draws for member in posterior.members))
    index, parts = [], []
    for kind in (~is_partial, is_partial):
        for within, rows in by_distance(posterior, data, np.flatnonzero(kind)):
            missing = np.isnan(data[rows])
            with jax_settings(within.dtype), one_blas_thread():
                x = to_model(np.where(missing, within.shift, data[rows]), within.frame, within.dtype)
                is_observed = ~missing[:, varying]
                if not is_observed.all():
                    parts.append(_partial(within, x, is_observed.astype(x.dtype), num_draws, wanted))
                else:
                    parts.append(_complete(within, x, num_draws))
            index.append(rows)
    return np.concatenate(parts, dtype=np.float64)[np.argsort(np.concatenate(index))]


def class_log_probabilities(
    posterior: ClassPosterior,
    X: ArrayLike,
    *,
    vote: bool = False,
    num_draws: int | None = None,
    num_candidates: int | None = None,
) -> Float[np.ndarray, "n G"]:
    """Log probability of every class given each row of X, (n, D); NaN is a missing value.

    From the posterior predictive densities of the classes, averaged over draws and trees and raised to the power that
    calibrates them. With `vote`, as in the paper, the log of the share of draws under which the class is the most
    probable one (-inf if there is no such draw); equally probable classes share a draw. `num_draws` and
    `num_candidates`: as in :func:`class_log_densities`.
    """
    check_instance(vote, "vote", bool)
    check_instance(posterior, "posterior", ClassPosterior)
    data = check_data(X, "X", allow_nan=True, num_features=posterior.num_features)
    share = (~np.isnan(data[:, posterior.varying_features])).mean(axis=1, keepdims=True)
    found = np.empty((data.shape[0], posterior.num_classes))
    # apart, as a complete row's number of draws must not depend on whether another row has gaps
    kinds = np.flatnonzero(share == 1.0), np.flatnonzero(share < 1.0)
    most = CLASS_DRAWS if num_draws is None else check_integer(num_draws, "num_draws", 1)
    of_tree = min(most, *(member.num_chains * member.num_draws for member in posterior.members))
    width = posterior.num_classes * posterior.members[0].num_trees * of_tree
    parts = [kind[some] for kind in kinds for some in slices(kind.size, width, numbers=NUMBERS_AT_ONCE)]
    for rows in parts:
        by_draw = class_log_densities(posterior, data[rows], num_draws=num_draws, num_candidates=num_candidates)
        if vote:
            score = by_draw + posterior.log_prior[:, None]
            is_best = score == score.max(axis=1, keepdims=True)
            with np.errstate(divide="ignore"):
                found[rows] = np.log((is_best / is_best.sum(axis=1, keepdims=True)).mean(axis=2))
        else:
            power = posterior.power_at(share[rows])
            found[rows] = special.log_softmax(posterior.log_prior + power * mean_over_draws(by_draw), axis=1)
    return found


def mean_over_draws(log_density: Float[np.ndarray, "n G T"]) -> Float[np.ndarray, "n G"]:
    """Log posterior predictive density, from the log densities under every draw."""
    return special.logsumexp(log_density, axis=2) - np.log(log_density.shape[2])


def _complete(posterior: ClassPosterior, x: np.ndarray, num_draws: int) -> np.ndarray:
    outside = posterior.log_density_outside(x)[:, None]
    if posterior.reduction is not None:
        x = posterior.reduction.coordinates(x)
    found = []
    for member in posterior.members:
        draws = thinned(member, num_draws)
        own = in_row_space(member, x)
        by_draw = map_row_blocks(
            log_densities,
            (member.dictionary, draws),
            own,
            bytes_per_row=member.num_trees * density_row_bytes(draws, own),
        )
        found.append(by_draw.reshape(x.shape[0], -1) + outside)
    return np.stack(found, axis=1)


def _partial(
    posterior: ClassPosterior, x: np.ndarray, is_observed: np.ndarray, num_draws: int, num_candidates: int
) -> np.ndarray:
    jacobian = -(is_observed @ np.log(posterior.scale[posterior.varying_features]))[:, None]
    reduction = posterior.reduction
    found = []
    shown = None
    if reduction is not None:
        mesh = mesh_of(posterior.members[0].dictionary)
        parts = (np.asarray(part, x.dtype) for part in (reduction.origin, reduction.basis, reduction.noise))
        origin, basis, noise = jax.device_put(tuple(parts), None if mesh is None else everywhere(mesh))
        rank = basis.shape[1]
        shown = map_partial_rows(
            show,
            (origin, basis),
            x,
            is_observed,
            posterior=None,
            bytes_per_row=x.itemsize * ((4 + rank) * x.shape[1] + 4 * rank * rank),  # a masked basis each, or less
        )
    for member in posterior.members:
        draws = thinned(member, num_draws)
        width = min(num_candidates, member.dictionary.tree.num_nodes)
        if shown is not None:
            by_draw = map_row_blocks(
                log_density_reduced,
                (member.dictionary, draws, noise),
                shown,
                bytes_per_row=reduced_row_bytes(member.dictionary, width, draws.log_joint.shape[1]),
                calls_lapack=True,
                num_candidates=width,
            )
        else:
            by_draw = map_partial_rows(
                log_densities_partial,
                (Nodes(member.dictionary, None), draws),
                x,
                is_observed,
                posterior=member,
                bytes_per_row=member.num_trees * partial_row_bytes(member, draws, width, is_observed),
                num_candidates=width,
            )
        found.append(without_empty(by_draw.reshape(x.shape[0], -1), is_observed) + jacobian)
    return np.stack(found, axis=1)

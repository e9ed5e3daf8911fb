"""Convergence of the chains: split R-hat and effective sample sizes of label-invariant quantities.

Nodes of different trees are not comparable, so chains are compared within a tree only. Rank-normalised split R-hat,
bulk and tail effective sample size as in Vehtari et al. (2021, Bayesian Analysis 16), with NumPyro's estimators.

``geode_jax.diagnostics`` is imported on first use: it needs NumPyro, which the rest of the package does not.
"""

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from scipy import special, stats

from geode_jax._checks import check_instance
from geode_jax._typing import ArrayLike
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.api import log_density_draws
from geode_jax.settings import GammaPrior

# Vehtari et al. recommend R-hat below 1.01 and 100 effective draws per chain before a posterior is reported. The limits
# here are looser. They are for parameters: densities are averages over trees, and settle long before.
LARGEST_R_HAT = 1.05
FEWEST_EFFECTIVE = 50
# Quantities of one kind of problem that have a line each in a report; the rest is counted.
MOST_TOLD = 5
# Noise below this share of the features' units is too small for any measurement: it has collapsed.
COLLAPSED_NOISE = 1e-4
# Largest share of posterior mass at nodes that are not candidates that is not reported.
LARGEST_LOST_MASS = 0.01


class Diagnostic(NamedTuple):
    """Convergence of one scalar in one tree; `r_hat` near 1 and many effective draws are good."""

    tree: int
    quantity: str
    mean: float
    sd: float
    r_hat: float
    ess_bulk: float
    ess_tail: float


def quantities(posterior: Posterior, X: ArrayLike | None = None) -> dict[str, np.ndarray]:
    """Label-invariant scalars of every draw, (F, C, T) each.

    The log joint; log sigma and weight of every scale that holds at least 1% of some tree's weight; the number of
    active directions of a row's node; log a_S if it is learned; and with rows X, shape (n, D), the log density of each
    row, which predictions average, and their mean.
    """
    check_instance(posterior, "posterior", Posterior)
    weights = posterior.scale_weights
    count = np.asarray(posterior.draws.count, np.float64)
    active = np.asarray(posterior.draws.is_active).sum(axis=-1)
    found = {"log joint": np.asarray(posterior.draws.log_joint, np.float64)}
    for scale in np.flatnonzero(weights.mean(axis=(1, 2)).max(axis=0) >= 0.01):
        found[f"log sigma at scale {scale}"] = np.log(posterior.sigma[..., scale])
        found[f"weight of scale {scale}"] = weights[..., scale]
    found["active directions"] = (count * active).sum(axis=-1) / count.sum(axis=-1)
    if isinstance(posterior.prior.stop_concentration, GammaPrior):
        found["log stop concentration"] = np.asarray(posterior.draws.log_stop_concentration, np.float64)
    if X is not None:
        densities = log_density_draws(posterior, X)
        found["mean log density of the rows"] = densities.mean(axis=-1)
        for row in range(densities.shape[-1]):
            found[f"log density of row {row}"] = densities[..., row]
    return found


def diagnose(posterior: Posterior, X: ArrayLike | None = None) -> list[Diagnostic]:
    """Every quantity of every tree; with a few rows X also their log densities.

    Raises ValueError where chains have fewer than 4 draws.
    """
    check_instance(posterior, "posterior", Posterior)
    if posterior.num_draws < 4:
        raise ValueError(f"posterior: expected at least 4 draws per chain, got {posterior.num_draws}")
    return [
        _diagnose_one(tree, name, values[tree])
        for name, values in quantities(posterior, X).items()
        for tree in range(posterior.num_trees)
    ]


def report(posterior: Posterior, X: ArrayLike | None = None) -> str:
    """Report problems of the chains in words, with what to do about them, and the choices of stage one.

    With rows X, shape (n, D), for example ten typical ones, it also says whether their log densities have converged.
    After a fit with defaults, one chain of 100 draws per tree, expect problems: that is enough for predictions, which
    average over trees, but not for these limits. The five worst quantities of each kind are told.
    """
    check_instance(posterior, "posterior", Posterior)
    chosen = [f"chosen from the data: {decision}" for decision in posterior.found.decisions]
    return "\n".join([_problems(posterior, X), *chosen])


def _problems(posterior: Posterior, X: ArrayLike | None) -> str:
    differs = _chains_with_other_directions(posterior)
    problems = _complaints(
        [one for one in diagnose(posterior, X) if not (differs[one.tree] and one.quantity in _BY_DIRECTIONS)]
    )
    problems += [
        f"tree {tree}: after adaptation the chains use different directions, so that their log joints and active"
        " directions cannot be compared; run with adaptation=None to compare them"
        for tree in np.flatnonzero(differs)
    ]
    rank = posterior.found.rank
    num_rows = int(np.asarray(posterior.draws.count[0, 0, 0]).sum())
    if posterior.intrinsic_dimension is None and rank < min(num_rows, posterior.dictionary.num_features) - 1:
        share = posterior.intrinsic_dimension_probabilities[-1]
        problems.append(
            f"{share:.0%} of the rows use all {rank} directions, the commonest number and the most allowed: the"
            " intrinsic dimension may be larger; raise max_rank to see"
        )
    problems += _complaints_about_scales(posterior)
    lost = 0.0 if posterior.lost_mass is None else float(np.mean(posterior.lost_mass))
    if lost > LARGEST_LOST_MASS:
        problems.append(
            f"candidate nodes leave out {lost:.1%} of the posterior mass of the complete rows; raise num_candidates"
            f" (now {posterior.found.num_candidates})"
        )
    if problems:
        return "\n".join(problems)
    chains = "chains agree" if posterior.num_chains > 1 else "the one chain per tree agrees with itself (run several)"
    return f"no problem found: {chains}, and every quantity has at least {FEWEST_EFFECTIVE} effective draws"


# Quantities that differ by construction between chains that ended adaptation with different directions.
_BY_DIRECTIONS = ("log joint", "active directions")


def _chains_with_other_directions(posterior: Posterior) -> np.ndarray:
    """Whether a tree's chains ended adaptation with different directions, at nodes that hold rows, (F,)."""
    is_active = np.asarray(posterior.draws.is_active)[:, :, -1]
    holds_rows = np.asarray(posterior.draws.count).mean(axis=2) >= 1.0
    return ((is_active != is_active[:, :1]) & holds_rows[..., None]).any(axis=(1, 2, 3))


def _complaints_about_scales(posterior: Posterior) -> list[str]:
    """Problems of scales: collapsed noise, and scales without rows."""
    weights = posterior.scale_weights.mean(axis=(0, 1, 2))
    # in model coordinates, where a feature's unit is 1
    noise = np.exp(0.5 * np.median(np.asarray(posterior.draws.log_sigma2, np.float64), axis=(0, 1, 2)))
    found = [
        f"scale {scale}: the noise has collapsed to {noise[scale]:.0e} of the features' units; look for repeated rows,"
        " or for features that follow from others"
        for scale in np.flatnonzero((noise < COLLAPSED_NOISE) & (weights >= 0.01))
    ]
    count = np.asarray(posterior.draws.count, np.float64).mean(axis=(1, 2))
    by_scale = np.stack([count[:, posterior.dictionary.tree.scale == scale].sum(axis=1) for scale in range(noise.size)])
    last = int(np.flatnonzero(by_scale.max(axis=1) >= 1.0).max(initial=0))
    if last < noise.size - 1:
        found.append(
            f"scales {last + 1} to {noise.size - 1} hold no row; depth={last} gives the same posterior at less cost"
        )
    return found


def _diagnose_one(tree: int, name: str, values: np.ndarray) -> Diagnostic:
    if np.ptp(values) == 0.0:  # the same in every draw of every chain: nothing to disagree on
        return Diagnostic(tree, name, float(values.flat[0]), 0.0, 1.0, float(values.size), float(values.size))
    half = values.shape[1] // 2
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    folded = np.abs(values - np.median(values))
    tails = [_effective((halves <= np.quantile(halves, level)).astype(float)) for level in (0.05, 0.95)]
    return Diagnostic(
        tree=tree,
        quantity=name,
        mean=float(values.mean()),
        sd=float(values.std()),
        r_hat=max(_r_hat(_normal_scores(part)) for part in (values, folded)),
        ess_bulk=_effective(_normal_scores(halves)),
        ess_tail=min(tails),
    )


def _r_hat(values: np.ndarray) -> float:
    """Split R-hat; infinite if every chain is constant, at different values."""
    if np.ptp(values) == 0.0:
        return 1.0
    if (np.ptp(values, axis=1) == 0.0).all():
        return np.inf
    return float(split_gelman_rubin(values))


def _effective(values: np.ndarray) -> float:
    """Effective sample size over chains; one draw per chain if every chain is constant, at different values.

    The autocorrelation time counts as at least 1 / log10(S) of S draws, as in Stan and ArviZ: NumPyro's estimate of it
    may be near 0, or negative, where draws alternate or are few.
    """
    if np.ptp(values) == 0.0:
        return float(values.size)
    if (np.ptp(values, axis=1) == 0.0).all():
        return float(values.shape[0])
    with np.errstate(divide="ignore"):
        time = values.size / effective_sample_size(values)
    return float(values.size / max(time, 1.0 / np.log10(values.size)))


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Ranks over all chains, mapped to normal quantiles."""
    ranks = stats.rankdata(values, method="average").reshape(values.shape)
    return special.ndtri((ranks - 0.375) / (values.size + 0.25))


def _complaints(found: list[Diagnostic]) -> list[str]:
    """Chains that disagree, and quantities with few effective draws: the worst of each, and how many more there are."""
    disagree = sorted((one for one in found if not one.r_hat <= LARGEST_R_HAT), key=lambda one: -one.r_hat)
    few = sorted(
        (one for one in found if one.r_hat <= LARGEST_R_HAT and not _fewest(one) >= FEWEST_EFFECTIVE), key=_fewest
    )
    lines = [
        f"tree {one.tree}, {one.quantity}: chains (or the halves of one) disagree, R-hat {one.r_hat:.2f}; raise"
        " num_warmup and num_samples, and if they still disagree they sit in different modes, over which predictions"
        " average"
        for one in disagree[:MOST_TOLD]
    ]
    lines += _more(disagree, len(found), "in which chains disagree")
    lines += [
        f"tree {one.tree}, {one.quantity}: only {_fewest(one):.0f} effective draws; raise num_samples"
        for one in few[:MOST_TOLD]
    ]
    lines += _more(few, len(found), "with few effective draws")
    if lines:
        lines.append(
            "these limits are for parameters and the density of one tree; predictions average over trees and may have"
            " settled: compare their held-out log density with that of longer chains"
        )
    return lines


def _fewest(one: Diagnostic) -> float:
    return min(one.ess_bulk, one.ess_tail)


def _more(told: list[Diagnostic], number: int, what: str) -> list[str]:
    """A line on those that have none of their own."""
    if len(told) <= MOST_TOLD:
        return []
    return [f"{len(told) - MOST_TOLD} more of {number} quantities {what}: diagnose has their numbers"]

"""Truncation error of a finite depth and a finite rank under the prior, and the depth and rank a given error needs.

The model's tree may be infinite, and so may the number of directions of a node. Let f be the density under the infinite
model and g that of the truncated model, given the same parameters. Errors are bounds on the prior mean of their total
variation distance (the paper's two truncation theorems, for the prior used here).

**Depth.** If the tree ends at scale L, where every row stops, the distribution changes only for rows that would have
gone on. Each of the L + 1 nodes on their path lets them pass with probability 1 - S, S ~ Beta(1, a_S), so that

    E TV(f, g)  <=  E ( a_S / (1 + a_S) )^(L + 1) .

**Rank.** Without direction m its variance sigma2 / u is sigma2, and the divergence KL(g || f) of a node grows by
(u - 1 - log u) / 2 <= (log u)^2 / 4. Given delta, -log u has a density proportional to exp(-(delta + 1) t - exp(-t)),
whose last factor lies between 1/e and 1, hence E (log u)^2 <= 2 e / (delta + 1)^2. With delta = tau_1 ... tau_m and
r = E tau^-2 = a (1 - a e^a E_1(a)) these sum up to a geometric series, and by Pinsker's inequality

    E TV(f, g)  <=  ( e r^(d + 1) / (4 (1 - r)) )^(1/2) .

Data may need more than the prior expects: these are lower bounds for `depth` and `max_rank`, not recommended values.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import integrate, optimize, special

from geode_jax._checks import check_instance, check_integer, check_number
from geode_jax.settings import GammaPrior, Prior


def depth_error(depth: int, prior: Prior | None = None) -> float:
    """Bound on the expected total variation distance of a tree with `depth` scales below the root."""
    depth = check_integer(depth, "depth", 0)
    concentration = (check_instance(prior, "prior", (Prior, None)) or Prior()).stop_concentration
    if not isinstance(concentration, GammaPrior):
        return math.exp(-(depth + 1) * math.log1p(1.0 / concentration))
    return _mean_over(concentration, depth + 1)


def rank_error(rank: int, prior: Prior | None = None) -> float:
    """Bound on the expected total variation distance of a model with `rank` directions per node."""
    rank = check_integer(rank, "rank", 0)
    a = (check_instance(prior, "prior", (Prior, None)) or Prior()).tau_rate
    ratio = a * float(special.hyperu(1.0, 0.0, a))  # without the difference in the formula above
    return 1.0 if ratio >= 1.0 else min(1.0, math.sqrt(math.e * ratio ** (rank + 1) / (4.0 * (1.0 - ratio))))


def depth_for(error: float, prior: Prior | None = None) -> int:
    """The least depth whose :func:`depth_error` is at most `error`."""
    error = check_number(error, "error", above=0.0, below=1.0)
    return _least(lambda depth: depth_error(depth, prior) <= error)


def rank_for(error: float, prior: Prior | None = None) -> int:
    """The least rank whose :func:`rank_error` is at most `error`, and at least 1."""
    error = check_number(error, "error", above=0.0, below=1.0)
    return max(1, _least(lambda rank: rank_error(rank, prior) <= error))


def _least(is_enough: Callable[[int], bool]) -> int:
    """The smallest number from 0 for which `is_enough` holds; it must hold for all larger ones."""
    low, high = -1, 1
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _mean_over(prior: GammaPrior, power: int) -> float:
    """Mean of ``(a / (1 + a))^power`` over the prior of a: an integral over log a, whose integrand has one mode."""

    def log_integrand(y: float) -> float:
        return prior.shape * (y + math.log(prior.rate)) - prior.rate * np.exp(y) - power * np.logaddexp(0.0, -y)

    def slope(y: float) -> float:
        return prior.shape - prior.rate * np.exp(y) + power * special.expit(-y)

    # at the right end the rate pulls harder to the left than all else to the right
    left, right = math.log(prior.shape / prior.rate), math.log((prior.shape + power) / prior.rate)
    mode = float(optimize.brentq(slope, left - 1.0, right + 1.0))
    width = 1.0 / math.sqrt(prior.rate * math.exp(mode) + power * special.expit(mode) * special.expit(-mode))
    top = log_integrand(mode)

    def on_side(sign: float) -> float:
        def relative(t: float) -> float:
            return float(np.exp(log_integrand(mode + sign * width * t) - top))

        return float(integrate.quad(relative, 0.0, math.inf, epsabs=0.0)[0])

    with np.errstate(over="ignore"):
        area = width * (on_side(-1.0) + on_side(1.0))
    return min(1.0, math.exp(top - special.gammaln(prior.shape)) * area)

"""The posterior predictive written out: every component of every draw as a full-covariance normal, in data units."""

from typing import NamedTuple

import numpy as np
from scipy import special


class Oracle(NamedTuple):
    """Components of one tree and draw each: log weights (M,), means (M, D), covariances (M, D, D); M over F, T, K."""

    log_weight: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    tree: np.ndarray
    node: np.ndarray
    cap: np.ndarray  # what variances are multiplied by where a scale without rows counts with no more than the data's

    def log_joint(self, x, seen):
        """log weight + log N(x_seen) of every component, (n, M)."""
        factor = np.linalg.cholesky(self.covariance[:, seen][:, :, seen])
        white = np.linalg.solve(factor, np.swapaxes(x[:, seen] - self.mean[:, None, seen], 1, 2))
        log_det = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        out = -0.5 * np.square(white).sum(axis=1).T - log_det
        return out - 0.5 * seen.sum() * np.log(2 * np.pi) + self.log_weight

    def log_density(self, x, seen):
        return special.logsumexp(self.log_joint(x, seen), axis=1)

    def conditional(self, row, seen):
        """Weights (trees count equally), means and variances of the missing coordinates, per component."""
        joint = self.log_joint(row[None], seen)[0]
        weight = np.zeros_like(joint)
        trees = np.unique(self.tree)
        for tree in trees:
            inside = self.tree == tree
            weight[inside] = special.softmax(joint[inside]) / trees.size
        among, across, rest = (
            self.covariance[:, one][:, :, other] for one, other in ((seen, seen), (seen, ~seen), (~seen, ~seen))
        )
        gain = np.swapaxes(np.linalg.solve(among, across), 1, 2)
        mean = self.mean[:, ~seen] + np.einsum("mij,mj->mi", gain, row[seen] - self.mean[:, seen])
        variance = np.diagonal(rest - gain @ across, axis1=1, axis2=2)
        return weight, mean, variance

    def pooled(self, row, seen):
        """`conditional` with the trees' average drawn together about its mean.

        Variances as draws have them, and, last, as quantiles have them.
        """
        weight, mean, drawn = self.conditional(row, seen)
        variance = drawn * self.cap[:, None]
        trees = np.unique(self.tree)
        own = [weight * (self.tree == tree) * trees.size for tree in trees]
        centre = np.stack([share @ mean for share in own])
        within = np.mean([s @ (variance + np.square(mean - c)) for s, c in zip(own, centre, strict=True)], axis=0)
        between = np.square(centre - centre.mean(axis=0)).mean(axis=0)
        share, others = between / (within + between), trees.size - 1
        most = others / (2 * trees.size - 1)
        factor = np.sqrt(max(1.0 - 2.0 * np.minimum(share, most).mean(), share.mean() / max(others, 1)))
        average = centre.mean(axis=0)
        return weight, average + factor * (mean - average), factor**2 * drawn, factor**2 * variance


def make_oracle(posterior, num_draws=None):
    draws = posterior.thin(num_draws)
    dictionary = posterior.dictionary
    scale = dictionary.tree.scale
    root = np.eye(posterior.num_features) if posterior.noise_root is None else posterior.noise_root
    parts = []
    trees, length = draws.log_joint.shape
    for f in range(trees):
        for t in range(length):
            log_weights = np.asarray(draws.log_weights[f, t], np.float64)
            held = np.bincount(scale, np.asarray(draws.count[f, t]))
            for k in np.flatnonzero(np.isfinite(log_weights)):
                basis = np.asarray(dictionary.bases[f, k], np.float64)
                sigma2 = np.exp(float(draws.log_sigma2[f, t, scale[k]]))
                alpha2 = sigma2 * np.expm1(np.asarray(draws.neg_log_u[f, t, k], np.float64))
                covariance = root @ (basis * alpha2 @ basis.T + sigma2 * np.eye(basis.shape[0])) @ root
                centre = root @ np.asarray(dictionary.centres[f, k], np.float64)
                parts.append(
                    (
                        log_weights[k] - np.log(trees * length),
                        posterior.shift + posterior.scale * centre,
                        posterior.scale[:, None] * covariance * posterior.scale,
                        f,
                        k,
                        1.0 if held[scale[k]] else min(1.0, 1.0 / sigma2),
                    )
                )
    return Oracle(*(np.array(part) for part in zip(*parts, strict=True)))

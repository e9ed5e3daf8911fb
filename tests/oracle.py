"""The posterior predictive written out: every component of every draw as a full-covariance normal, in data units."""

from typing import NamedTuple

import numpy as np
from scipy import linalg, special


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
        out = np.empty((x.shape[0], self.log_weight.size))
        for m in range(self.log_weight.size):
            covariance = self.covariance[m][np.ix_(seen, seen)]
            factor = linalg.cholesky(covariance, lower=True)
            white = linalg.solve_triangular(factor, (x[:, seen] - self.mean[m, seen]).T, lower=True)
            out[:, m] = -0.5 * np.square(white).sum(0) - np.log(np.diag(factor)).sum()
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
        means, variances = [], []
        for mean, covariance in zip(self.mean, self.covariance, strict=True):
            gain = linalg.solve(covariance[np.ix_(seen, seen)], covariance[np.ix_(seen, ~seen)]).T
            means.append(mean[~seen] + gain @ (row[seen] - mean[seen]))
            variances.append(np.diag(covariance[np.ix_(~seen, ~seen)] - gain @ covariance[np.ix_(seen, ~seen)]))
        return weight, np.array(means), np.array(variances)

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

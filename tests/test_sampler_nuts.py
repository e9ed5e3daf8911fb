"""An independent sampler: the model written again in NumPyro with membership summed out, sampled by NUTS.

Nothing of the package enters the NumPyro model but the dictionary's numbers: dense covariances, the path products
written out, the normaliser by the regularised incomplete gamma function. Posterior means of every parameter agree
within Monte Carlo error: z statistics from effective sample sizes, false alarm 1e-4 in all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small
from jax.scipy.special import gammainc, gammaln, logsumexp
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy import stats

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.gibbs.sweep import sweep
from geode_jax.model.joint import simulate

NODES, SCALE = 3, np.array([0, 1, 1])


def _numpyro_model(x, centres, bases, mask, borrowed):
    """The joint of design and paper, for a root with two leaves."""
    prior = small.PRIOR
    hyperprior = prior.stop_concentration
    concentration = numpyro.sample("concentration", dist.Gamma(hyperprior.shape, hyperprior.rate))
    stop = numpyro.sample("stop", dist.Beta(1.0, concentration))
    right = numpyro.sample("right", dist.Beta(prior.right_concentration, prior.right_concentration))
    half = 0.5 * prior.noise_rows * x.shape[1]
    shape, rate = jnp.full(2, prior.noise_shape + half), prior.noise_rate + half * borrowed["noise"]
    precision = numpyro.sample("precision", dist.Gamma(shape, rate))
    rows, columns = np.nonzero(mask)
    excess = numpyro.sample("excess", dist.Exponential(prior.tau_rate).expand([rows.size]))
    u_free = numpyro.sample("u", dist.Uniform(0.0, 1.0).expand([rows.size]))
    tau = jnp.ones(mask.shape).at[rows, columns].set(1.0 + excess)
    delta = jnp.cumprod(tau, axis=1)[rows, columns]
    log_normaliser = gammaln(delta + 1.0) + jnp.log(gammainc(delta + 1.0, 1.0))
    numpyro.factor("u given tau", jnp.sum(delta * jnp.log(u_free) - u_free - log_normaliser))
    # borrowed rows: normal, of variance 1/u in units of the typical noise
    count, squared = borrowed["count"][rows], borrowed["squared"][rows, columns]
    numpyro.factor("borrowed", jnp.sum(0.5 * count * jnp.log(u_free) - 0.5 * u_free * squared))
    u = jnp.ones(mask.shape).at[rows, columns].set(u_free)
    sigma2 = 1.0 / precision[SCALE]
    alpha2 = sigma2[:, None] * (1.0 / u - 1.0)
    covariance = jnp.einsum("kim,km,kjm->kij", bases, alpha2, bases)
    covariance = covariance + sigma2[:, None, None] * jnp.eye(x.shape[1])
    weights = jnp.stack([stop, (1.0 - stop) * (1.0 - right), (1.0 - stop) * right])
    parts = dist.MultivariateNormal(centres, covariance).log_prob(x[:, None, :])
    numpyro.factor("rows", logsumexp(parts + jnp.log(weights), axis=1).sum())


def _moments(draws):
    """Mean and Monte Carlo variance of a (chains, draws, parameters) array."""
    effective = np.array([effective_sample_size(draws[:, :, j]) for j in range(draws.shape[2])])
    return draws.mean(axis=(0, 1)), draws.var(axis=(0, 1)) / effective


def _nuts(*arguments):
    mcmc = MCMC(
        NUTS(_numpyro_model, target_accept_prob=0.9),
        num_warmup=1000,
        num_samples=3000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), *arguments)
    found = {name: np.asarray(value) for name, value in mcmc.get_samples(group_by_chain=True).items()}
    logit = [np.log(found[name] / (1 - found[name]))[:, :, None] for name in ("stop", "right")]
    return np.concatenate(
        [
            *logit,
            -np.log(found["precision"]),
            np.log(-np.log(found["u"])),
            np.log1p(found["excess"]),
            np.log(found["concentration"])[:, :, None],
        ],
        axis=2,
    )


def _gibbs(problem, start, active):
    directions = tuple(np.argwhere(active).T)

    def step(carry, key):
        state, sums = sweep(key, *carry, problem)
        kept = jnp.concatenate(
            [
                state.logit_stop[:1],
                state.logit_right[:1],
                state.log_sigma2,
                state.log_neg_log_u[directions],
                state.log_tau[directions],
                state.log_stop_concentration[None],
            ]
        )
        return (state, sums), kept

    @jax.jit
    @jax.vmap
    def chain(key):
        carry = (start, small.sums_of(problem, start))
        return jax.lax.scan(step, carry, jax.random.split(key, 11_000))[1][1000:]

    return np.asarray(chain(small.keys(4, 4)))


def compare():
    """(mean under Gibbs, mean under NUTS, z) of every parameter."""
    with jax_settings(np.float64):
        dictionary = small.make_dictionary(jnp.float64, depth=1)
        active = np.array(dictionary.is_available)
        active[0, 1] = False
        state = small.draw_from_prior(
            jax.random.key(1), small.without_rows(dictionary), jnp.asarray(active), small.NUM_ROWS
        )
        x = simulate(jax.random.key(2), dictionary, state)
        problem = small.make_problem(dictionary, x)
        gibbs = _moments(_gibbs(problem, state, active))
        nuts = _moments(_nuts(x, dictionary.centres, dictionary.bases, active, vars(problem.borrowed)))
    return np.stack([gibbs[0], nuts[0], (gibbs[0] - nuts[0]) / np.sqrt(gibbs[1] + nuts[1])], axis=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_gibbs_agrees_with_nuts():
    """About a minute."""
    found = compare()
    print(found.round(3))
    z = found[:, 2]
    assert np.isfinite(z).all()
    assert np.abs(z).max() < stats.norm.isf(0.5e-4 / z.size)

"""The joint distribution, stated once; every block of the sampler is tested against it.

    z_i ~ pi                       pi_k: stop S_k at node k times the path of (1 - S), R and 1 - R down to it
    x_i | z_i = k  ~  N( mu_k, Phi_k diag(alpha2_k) Phi_k' + sigma2_{s(k)} I )
    u_km = 1 / (1 + alpha2_km / sigma2_{s(k)})  ~  Gamma(delta_km + 1, 1) truncated to (0, 1)
    delta_km = prod over j <= m of tau_kj,  tau_km ~ Exp(a) on [1, inf)
    1/sigma2_s ~ Gamma(a_sigma + w D/2, b_sigma + w D/2 t_s),  S_k ~ Beta(1, a_S) (1 at a leaf),  R_k ~ Beta(b_R, b_R)
    a_S given, or ~ Gamma

w rows of a scale's typical noise t_s count in the prior of its noise, and nu borrowed rows in that of a node's u: the
joint prior of a node's u and tau is multiplied by the product over m of ``u_km^(nu/2) exp(-u_km b_km / 2)``, with b the
sum of the borrowed rows' squared coordinates over the typical noise (model/borrowed.py). With w = nu = 0 it is the
paper's.

Densities are with respect to z, S, R, u, tau, 1/sigma2 and a_S (Wang, Canale & Dunson, section 2, with the exact
normaliser of the truncated gamma). The factor of the borrowed rows leaves one constant unknown.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import betaln, gammaln

from geode_jax._typing import Array, Bool, Count, DTypeLike, Float, Int, KeyArray
from geode_jax.math.lowrank import HIGHEST
from geode_jax.math.truncated import draw_log_truncated_gamma, log_lower_gamma_at_one
from geode_jax.model.borrowed import Borrowed, noise_prior
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.problem import Problem
from geode_jax.model.state import NodeSums, State, log_normal_constants
from geode_jax.model.tree import Tree
from geode_jax.settings import GammaPrior, Prior


def log_likelihood(state: State, sums: NodeSums, tree: Tree, num_features: Count) -> Float[Array, ""]:
    """Log p(x | z, u, sigma2), through the node sums."""
    neg_log_u = state.neg_log_u
    quadratic = sums.residual + jnp.sum(jnp.exp(-neg_log_u) * sums.squared, axis=-1)
    constants = log_normal_constants(neg_log_u, state.log_sigma2, tree, num_features)
    return jnp.sum(sums.count * constants - 0.5 * jnp.exp(-state.log_sigma2)[tree.scale] * quadratic)


def log_membership(state: State, sums: NodeSums, tree: Tree) -> Float[Array, ""]:
    """Log p(z | S, R)."""
    log_weights = tree.log_weights(state.logit_stop, state.logit_right)
    return jnp.sum(jnp.where(sums.count > 0, sums.count * log_weights, 0.0))


def log_prior_weights(state: State, tree: Tree, prior: Prior) -> Float[Array, ""]:
    """Log p(S, R | a_S), over internal nodes."""
    a, b = jnp.exp(state.log_stop_concentration), prior.right_concentration
    log_stop = state.log_stop_concentration + (a - 1.0) * jax.nn.log_sigmoid(-state.logit_stop)
    log_right = (b - 1.0) * (jax.nn.log_sigmoid(state.logit_right) + jax.nn.log_sigmoid(-state.logit_right)) - betaln(
        b, b
    )
    return jnp.sum(jnp.where(tree.is_internal, log_stop + log_right, 0.0))


def log_prior_stop_concentration(state: State, prior: Prior) -> Float[Array, ""]:
    """Log p(a_S); 0 where it is given."""
    if not isinstance(prior.stop_concentration, GammaPrior):
        return jnp.zeros_like(state.log_stop_concentration)
    shape, rate = prior.stop_concentration.shape, prior.stop_concentration.rate
    log_a = state.log_stop_concentration
    return shape * jnp.log(rate) - gammaln(shape) + (shape - 1.0) * log_a - rate * jnp.exp(log_a)


def log_prior_signal(state: State, borrowed: Borrowed) -> Float[Array, ""]:
    """Log p(u | tau), over active directions, with the factor of the borrowed rows; the normaliser depends on tau."""
    log_delta = state.log_delta
    log_u_density = (
        -jnp.exp(log_delta + state.log_neg_log_u) - jnp.exp(-state.neg_log_u) - log_lower_gamma_at_one(log_delta)
    )
    return jnp.sum(jnp.where(state.is_active, log_u_density + borrowed.log_factor(state.neg_log_u), 0.0))


def log_prior_shrinkage(state: State, prior: Prior) -> Float[Array, ""]:
    """Log p(tau), over active directions."""
    log_density = jnp.log(prior.tau_rate) - prior.tau_rate * state.tau_excess
    return jnp.sum(jnp.where(state.is_active, log_density, 0.0))


def log_prior_noise(state: State, prior: Prior, borrowed: Borrowed, num_features: Count) -> Float[Array, ""]:
    """Log p(1/sigma2), over scales."""
    a, b = noise_prior(prior, borrowed, num_features)
    log_precision = -state.log_sigma2
    return jnp.sum(a * jnp.log(b) - gammaln(a) + (a - 1.0) * log_precision - b * jnp.exp(log_precision))


def log_joint(state: State, sums: NodeSums, problem: Problem) -> Float[Array, ""]:
    """Log p(x, z, S, R, u, tau, 1/sigma2, a_S) in model coordinates; `sums` are the node sums of `state`.

    With every normaliser but that of the factor of the borrowed rows, which is the same for all states.

    Rows with missing features count as complete rows, with the statistics that were drawn for them.
    """
    tree, prior, num_features = problem.tree, problem.prior, problem.num_features
    return (
        log_likelihood(state, sums, tree, num_features)
        + log_membership(state, sums, tree)
        + log_prior_weights(state, tree, prior)
        + log_prior_stop_concentration(state, prior)
        + log_prior_signal(state, problem.borrowed)
        + log_prior_shrinkage(state, prior)
        + log_prior_noise(state, prior, problem.borrowed, num_features)
    )


def sample_prior(key: KeyArray, problem: Problem, is_active: Bool[Array, "K d"], num_rows: int) -> State:
    """Draw every parameter and the memberships of `num_rows` rows from the prior; the problem's rows are not used."""
    key_node, key_weights, key_shrinkage, key_noise, key_concentration = jax.random.split(key, 5)
    tree, prior, borrowed = problem.tree, problem.prior, problem.borrowed
    num_nodes, dtype = tree.num_nodes, borrowed.noise.dtype
    log_a = sample_log_stop_concentration(key_concentration, prior, dtype)
    concentration = jnp.full(num_nodes, prior.right_concentration, dtype)
    logit_stop, logit_right = logit_beta(
        key_weights,
        jnp.stack([jnp.ones(num_nodes, dtype), concentration]),
        jnp.stack([jnp.full(num_nodes, jnp.exp(log_a), dtype), concentration]),
    )
    logit_stop = jnp.where(tree.is_internal, logit_stop, jnp.inf)
    logit_right = jnp.where(tree.is_internal, logit_right, 0.0)
    log_neg_log_u, tau_excess = _sample_shrinkage(key_shrinkage, prior, borrowed, is_active)
    noise_shape, noise_rate = noise_prior(prior, borrowed, problem.num_features)
    log_precision = jax.random.loggamma(key_noise, noise_shape, dtype=dtype)
    log_weights = tree.log_weights(logit_stop, logit_right)
    return State(
        node=jax.random.categorical(key_node, log_weights, shape=(num_rows,)).astype(jnp.int32),
        logit_stop=logit_stop,
        logit_right=logit_right,
        log_neg_log_u=log_neg_log_u,
        tau_excess=tau_excess,
        log_sigma2=jnp.log(noise_rate).astype(dtype) - log_precision,
        log_stop_concentration=log_a,
        is_active=is_active,
        log_ratio=jnp.zeros(is_active.shape, dtype),
    )


def _sample_shrinkage(
    key: KeyArray, prior: Prior, borrowed: Borrowed, is_active: Bool[Array, "K d"]
) -> tuple[Float[Array, "K d"], Float[Array, "K d"]]:
    """Draw (log(-log u), tau - 1) of every node.

    By rejection: proposals come from the prior without borrowed rows. It takes long where many directions borrow.
    """
    dtype = borrowed.noise.dtype
    count, squared = borrowed.count[:, None], borrowed.squared
    # the factor is largest at u = count / squared
    largest = borrowed.log_factor(jnp.log(jnp.maximum(squared, count)) - jnp.log(jnp.maximum(count, 1e-30)))
    largest = jnp.where(count > 0.0, largest, 0.0)

    def propose(carry: tuple[Array, Array, Array, KeyArray]) -> tuple[Array, Array, Array, KeyArray]:
        log_neg_log_u, tau_excess, is_done, key = carry
        key, key_u, key_tau, key_accept = jax.random.split(key, 4)
        proposed = jax.random.exponential(key_tau, is_active.shape, dtype) / prior.tau_rate
        log_delta = jnp.cumsum(jnp.where(is_active, jnp.log1p(proposed), 0.0), axis=-1)
        drawn = draw_log_truncated_gamma(key_u, jnp.logaddexp(log_delta, 0.0), jnp.ones_like(log_delta))
        log_ratio = jnp.sum(borrowed.log_factor(jnp.exp(drawn)) - largest, where=is_active, axis=-1)
        is_taken = ~is_done & (-jax.random.exponential(key_accept, is_done.shape, dtype) < log_ratio)
        new = is_taken[:, None]
        return jnp.where(new, drawn, log_neg_log_u), jnp.where(new, proposed, tau_excess), is_done | is_taken, key

    nothing = jnp.zeros(is_active.shape, dtype)
    start = nothing, nothing, jnp.zeros(is_active.shape[0], bool), key
    log_neg_log_u, tau_excess, *_ = lax.while_loop(lambda carry: ~carry[2].all(), propose, start)
    return log_neg_log_u, tau_excess


def sample_log_stop_concentration(key: KeyArray, prior: Prior, dtype: DTypeLike) -> Float[Array, ""]:
    """Draw log a_S from its prior, or return it where it is given."""
    if not isinstance(prior.stop_concentration, GammaPrior):
        return jnp.log(jnp.asarray(prior.stop_concentration, dtype))
    log_unit = jax.random.loggamma(key, prior.stop_concentration.shape, (), dtype)
    return log_unit - jnp.log(jnp.asarray(prior.stop_concentration.rate, dtype))


def logit_beta(key: KeyArray, a: Array, b: Array) -> Array:
    """Draw the logit of a Beta(a, b) variable; precise however close the variable is to 0 or 1."""
    # both gammas in one call: two calls would take twice as long to compile
    log_a, log_b = jax.random.loggamma(key, jnp.stack([a, b]), dtype=a.dtype)
    return log_a - log_b


def simulate(key: KeyArray, dictionary: Dictionary, state: State) -> Float[Array, "n D"]:
    """Draw the rows given their memberships and the parameters, in model coordinates."""
    neg_log_u = state.neg_log_u[state.node]
    sigma = jnp.exp(0.5 * state.log_sigma2)[jnp.asarray(dictionary.tree.scale)[state.node]]
    return simulate_rows(key, dictionary, state.node, neg_log_u, sigma)


def simulate_rows(
    key: KeyArray,
    dictionary: Dictionary,
    node: Int[Array, "n"],
    neg_log_u: Float[Array, "n d"],
    sigma: Float[Array, "n"],
) -> Float[Array, "n D"]:
    """Draw one row from each given component: ``mu + Phi alpha eta + sigma eps``."""
    key_eta, key_eps = jax.random.split(key)
    alpha = sigma[:, None] * jnp.sqrt(jnp.expm1(neg_log_u))
    eta = alpha * jax.random.normal(key_eta, alpha.shape, alpha.dtype)
    noise = jax.random.normal(key_eps, (node.shape[0], dictionary.num_features), sigma.dtype)
    signal = jnp.einsum("nDd,nd->nD", dictionary.bases[node], eta, precision=HIGHEST)
    return dictionary.centres[node] + signal + sigma[:, None] * noise

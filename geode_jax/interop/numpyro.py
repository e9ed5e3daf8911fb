"""GEODE inside NumPyro: its sampler as an MCMC kernel, its posterior predictive as a distribution.

Imported by the user: ``from geode_jax.interop.numpyro import GeodeKernel, PosteriorPredictive``.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from geode_jax._checks import check_instance
from geode_jax._typing import Array, Float, Int, KeyArray
from geode_jax.fitting.stages import posterior_of
from geode_jax.forest.forest import Forest
from geode_jax.gibbs.chain import Chain, draw_of, initial_chain, step
from geode_jax.gibbs.run import Samples
from geode_jax.math.lowrank import HIGHEST
from geode_jax.model.dictionary import coloured
from geode_jax.model.draw import Draw
from geode_jax.model.problem import Problem
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.density import log_density_by_tree
from geode_jax.predict.rows import DENSITY_DRAWS, check_draws
from geode_jax.predict.samples import sample_rows
from geode_jax.rows.frame import FARTHEST
from geode_jax.settings import Prior, SamplerSettings

# Without it float32 products on a GPU would be rounded to ten bits (math/lowrank.py).
_sum_of_products = partial(jnp.einsum, precision=HIGHEST)


class KernelState(NamedTuple):
    """State of one MCMC chain; arrays have a leading axis F, as all trees of the forest are sampled at once.

    `draw` holds what MCMC collects (the fields of a draw, by name); `potential_energy` is minus the log joint, summed
    over trees. The memberships, ``chain.state.node``, are collected only if named in MCMC's `extra_fields`. Their shape
    is (F, places): the first ``forest.statistics.num_rows`` places are rows, the others are padding with value K.
    """

    draw: dict[str, Array]
    potential_energy: Float[Array, ""]
    chain: Chain
    sweep: Int[Array, ""]
    num_warmup: Int[Array, ""]
    rng_key: KeyArray


class GeodeKernel(MCMCKernel):
    """The Gibbs sampler as a kernel for :class:`numpyro.infer.MCMC`, with any of its chain methods.

    ```python
    forest = geode_jax.learn_forest(key_forest, X)
    kernel = GeodeKernel(forest)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=500, num_chains=4, chain_method="vectorized")
    mcmc.run(key_run, extra_fields=("potential_energy",))
    posterior = kernel.posterior(mcmc)
    ```

    One MCMC chain samples all trees of the forest. `shrinkage`, `membership` and `adaptation` are those of `sampler`;
    the number of sweeps and of chains are those of MCMC. Ranks adapt during MCMC's warm-up. For large data pass the
    problem as the model's argument, ``MCMC(..., jit_model_args=True).run(key, kernel.problem)``, so that it is not
    compiled in as a constant.

    Raises TypeError if an argument has the wrong type, and ValueError for a float64 forest while JAX's 64-bit types are
    off.
    """

    # ArviZ reads it from every kernel.
    model = None

    def __init__(self, forest: Forest, *, prior: Prior | None = None, sampler: SamplerSettings | None = None) -> None:
        self.forest = check_instance(forest, "forest", Forest)
        self._prior = check_instance(prior, "prior", (Prior, None)) or Prior()
        self._sampler = check_instance(sampler, "sampler", (SamplerSettings, None)) or SamplerSettings()
        self.problem = forest.problem(self._prior, self._sampler)

    @property
    def sample_field(self) -> str:
        """What MCMC collects."""
        return "draw"

    def init(
        self,
        rng_key: KeyArray,
        num_warmup: int,
        init_params: Any,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any],
    ) -> KernelState:
        """Over-dispersed initial state of one chain, or of one chain per key."""
        if init_params is not None:
            raise ValueError("init_params: expected None, for chains start over-dispersed from their keys")
        if jnp.result_type(float) != self.forest.dtype and self.forest.dtype == np.float64:
            raise ValueError(
                "forest: expected float32 while JAX's 64-bit types are off, got float64; call numpyro.enable_x64(), or"
                " learn the forest in float32"
            )
        problem = self._problem(model_args)

        def start(key: KeyArray) -> KernelState:
            key, key_start = jax.random.split(key)
            keys = jax.random.split(key_start, self.forest.num_trees)
            chain = jax.vmap(initial_chain)(keys, problem)
            number = jnp.zeros((), jnp.int32)
            return self._state(key, keys, chain, number, jnp.asarray(num_warmup, jnp.int32), problem)

        return start(rng_key) if is_prng_key(rng_key) else jax.vmap(start)(rng_key)

    def sample(self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]) -> KernelState:
        """One sweep over all trees, for one chain or for a batch of chains."""
        problem = self._problem(model_args)

        def advance(state: KernelState) -> KernelState:
            key, key_step = jax.random.split(state.rng_key)

            def one_tree(key: KeyArray, problem: Problem, chain: Chain) -> Chain:
                return step(key, problem, state.num_warmup, self._sampler.adaptation, chain, state.sweep)

            keys = jax.random.split(key_step, self.forest.num_trees)
            chain = jax.vmap(one_tree)(keys, problem, state.chain)
            return self._state(key, keys, chain, state.sweep + 1, state.num_warmup, problem)

        return advance(state) if state.sweep.ndim == 0 else jax.vmap(advance)(state)

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Text beside NumPyro's progress bar."""
        active = float(state.draw["is_active"].sum()) / float(self.problem.tree.is_present.sum())
        return f"log joint {-float(state.potential_energy):.6g}, {active:.1f} directions per node"

    def posterior(self, mcmc: MCMC) -> Posterior:
        """The draws of a finished run, for every function of the package that takes a posterior."""
        check_instance(mcmc, "mcmc", MCMC)
        if mcmc.sampler is not self:
            raise ValueError("mcmc: expected a run of this kernel, got one of another; that one has its posterior")
        if mcmc.last_state is None:
            raise ValueError("mcmc: expected a run that has finished, got one that was not started")
        if np.max(mcmc.last_state.sweep) <= np.max(mcmc.last_state.num_warmup):
            raise ValueError("mcmc: expected a run that has drawn samples, got one that has only warmed up")
        # (C, T, F, ...) to (F, C, T, ...)
        collected = dict(mcmc.get_samples(group_by_chain=True))  # the run keeps its own
        collected["is_active"] = collected["is_active"].astype(bool)
        draws = Draw(**{name: jnp.moveaxis(values, 2, 0) for name, values in collected.items()})
        draws = jax.tree.map(np.asarray, draws)
        tallies = jax.tree.map(np.asarray, mcmc.last_state.chain.adaptation)
        axis = 0 if mcmc.num_chains > 1 else None
        adaptation = jax.tree.map(
            lambda leaf: leaf[:, None] if axis is None else np.swapaxes(leaf, 0, 1),
            tallies,
        )
        settings = dataclasses.replace(
            self._sampler,
            num_warmup=mcmc.num_warmup,
            num_samples=draws.log_joint.shape[2],
            num_chains=mcmc.num_chains,
            thinning=mcmc.thinning,
        )
        return posterior_of(self.forest, Samples(draws, adaptation), self._prior, settings)

    def _problem(self, model_args: tuple[Any, ...]) -> Problem:
        return check_instance(model_args[0], "problem", Problem) if model_args else self.problem

    def _state(
        self, key: KeyArray, keys: KeyArray, chain: Chain, sweep: Array, num_warmup: Array, problem: Problem
    ) -> KernelState:
        """`keys`: those of the trees' last steps, or of their start."""
        draw = jax.vmap(draw_of)(keys, chain, problem)
        # NumPyro's summaries take quantiles, which booleans have none of
        fields = {**vars(draw), "is_active": draw.is_active.astype(jnp.int32)}
        return KernelState(fields, -draw.log_joint.sum(), chain, sweep, num_warmup, key)


class PosteriorPredictive(Distribution):
    """The posterior predictive density of a fit as a NumPyro distribution over rows, with event shape (D,).

    For use inside a model, ``numpyro.sample("x", PosteriorPredictive(posterior), obs=x)``, or as a prior of a latent
    vector: `log_prob` is differentiable. In the data's units and JAX's current default precision. The density is
    averaged over `num_draws` posterior draws per tree (None: at most 200), and over all trees with equal weights. In
    float32, rows far from the origin (years, large coordinates) keep their digits if they are a float64 NumPy array.
    Features that never varied in the training rows are normal, with their value as the mean and a small deviation. A
    value whose last axis is not D is an error: it is not broadcast. A row with NaN is outside the support: as in
    NumPyro's own distributions -inf, and a warning, or NaN with ``validate_args=False``. (:func:`geode_jax.log_density`
    takes rows with missing values.)
    """

    support = constraints.real_vector
    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_data_fields = ("dictionary", "draws", "shift", "rest", "scale", "root", "inverse_root", "space", "features")

    def __init__(
        self, posterior: Posterior, *, num_draws: int | None = None, validate_args: bool | None = None
    ) -> None:
        check_instance(posterior, "posterior", Posterior)
        draws = posterior.thin(check_draws(num_draws, DENSITY_DRAWS))
        root, inverse = posterior.noise_root, posterior.frame.inverse_root
        parts = posterior.dictionary, draws, posterior.shift, posterior.scale, root, inverse, posterior.space
        parts = jax.tree.map(_in_default_precision, parts)
        self.dictionary, self.draws, self.shift, self.scale, self.root, self.inverse_root, self.space = parts
        self.rest = _in_default_precision(posterior.shift - np.asarray(self.shift, np.float64))  # what rounding took
        self.features = None if posterior.features is None else jnp.asarray(posterior.features)
        super().__init__((), (posterior.num_features,), validate_args=validate_args)

    @validate_sample
    def log_prob(self, value: Float[Array, "*batch D"], intermediates: Any = None) -> Float[Array, "*batch"]:
        """Log density in nats."""
        if jnp.shape(value)[-1:] != self.event_shape:
            raise ValueError(f"value: expected shape (..., {self.event_shape[0]}), got {jnp.shape(value)}")
        farthest = FARTHEST[self.scale.dtype.name]
        scaled = jnp.clip(self._relative_to_shift(value) / self.scale, -farthest, farthest)
        of_x = scaled if self.features is None else scaled[..., self.features]
        rows = _times(of_x, self.inverse_root).reshape(-1, of_x.shape[-1])
        if self.space is not None:
            rows = self.space.coordinates(rows)
        by_tree = log_density_by_tree(self.dictionary, self.draws, rows)
        total = jax.nn.logmeanexp(by_tree, axis=1) - jnp.log(self.scale).sum()
        total = total.reshape(scaled.shape[:-1])
        if self.features is None:
            return total
        cost = self._is_constant * (jnp.square(scaled) + jnp.log(2 * jnp.pi))
        return total - 0.5 * jnp.sum(cost, axis=-1)

    def _relative_to_shift(self, value: Any) -> Float[Array, "*batch D"]:
        """``value - shift`` from the leading digits of both, whose difference is exact, and from what these leave."""
        left, dtype = jnp.zeros((), self.shift.dtype), self.shift.dtype
        if isinstance(value, np.ndarray) and value.dtype == np.float64:
            value = np.clip(value, np.finfo(dtype).min, np.finfo(dtype).max)
            left = jnp.asarray((value - value.astype(dtype)).astype(dtype))
        return (jnp.asarray(value) - self.shift) + (left - self.rest)

    def sample(self, key: KeyArray, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*sample D"]:
        """New rows."""
        num_rows = int(np.prod(sample_shape, dtype=int))
        rows = sample_rows(key, self.dictionary, self.draws, self.space, jnp.arange(max(num_rows, 1)))[:num_rows]
        scaled = self._in_all(_times(rows, self.root))
        if self.features is not None:
            own = jax.random.normal(jax.random.fold_in(key, 2**31 - 1), scaled.shape, scaled.dtype)
            scaled += self._is_constant * own
        return (self.shift + self.scale * scaled).reshape(*sample_shape, *self.event_shape)

    @property
    def mean(self) -> Float[Array, "D"]:
        """Mean of the mixture over trees, draws and nodes."""
        mean = _sum_of_products("fk,fkc->c", self._node_weights().sum(axis=1), self.dictionary.centres)
        return self.shift + self.scale * self._in_all(self._in_features(mean))

    @property
    def variance(self) -> Float[Array, "D"]:
        """Variance of every coordinate, between and within the nodes."""
        weights = self._node_weights()
        by_node = weights.sum(axis=1)
        sigma2 = jnp.exp(self.draws.log_sigma2)[:, :, jnp.asarray(self.dictionary.tree.scale)]
        alpha2 = _sum_of_products("ftk,ftk,ftkm->fkm", weights, sigma2, jnp.expm1(self.draws.neg_log_u))
        forest = coloured(self.dictionary, self.root)
        offset = forest.centres - _sum_of_products("fk,fkc->c", by_node, forest.centres)
        noise = 1.0 if self.root is None else jnp.sum(jnp.square(self.root), axis=0)
        if self.space is None:
            within = _sum_of_products("fkDm,fkm->D", jnp.square(forest.bases), alpha2)
            of_nodes = _sum_of_products("fk,fkD->D", by_node, jnp.square(offset)) + within
        else:
            between = _sum_of_products("fk,fkc,fke->ce", by_node, offset, offset)
            within = _sum_of_products("fkcm,fkm,fkem->ce", forest.bases, alpha2, forest.bases)
            half = self._in_features(between + within)  # (c, D)
            of_nodes = jnp.sum(self.space.coloured(half[:-1].T) * self.space.axes, axis=1)
            noise = self.space.noise_variance()
        found = self._in_all(of_nodes + noise * jnp.sum(weights * sigma2)) + self._is_constant
        return jnp.square(self.scale) * found

    @property
    def _is_constant(self) -> Float[Array, "D"]:
        """1 for the features that never varied."""
        varies = self._in_all(jnp.ones(self.event_shape if self.features is None else self.features.shape))
        return (1.0 - varies).astype(self.scale.dtype)

    def _in_all(self, values: Float[Array, "*batch V"]) -> Float[Array, "*batch D"]:
        """Values of the features that vary, and 0 for the others."""
        if self.features is None:
            return values
        whole = jnp.zeros((*values.shape[:-1], *self.event_shape), values.dtype)
        return whole.at[..., self.features].set(values)

    def _node_weights(self) -> Float[Array, "F T K"]:
        num_trees, num_draws = self.draws.log_joint.shape
        return jnp.exp(self.draws.log_weights) / (num_trees * num_draws)

    def _in_features(self, points: Float[Array, "*batch c"]) -> Float[Array, "*batch D"]:
        """Points in the dictionary's coordinates in those of the features over their scales."""
        if self.space is not None:
            return self.space.features(points)
        return _times(points, self.root)


def _times(rows: Float[Array, "*batch D"], matrix: Float[Array, "D D"] | None) -> Float[Array, "*batch D"]:
    return rows if matrix is None else jnp.matmul(rows, matrix, precision=HIGHEST)


def _in_default_precision(leaf: Any) -> Array:
    array = np.asarray(leaf)
    return jnp.asarray(array, jnp.result_type(float)) if array.dtype.kind == "f" else jnp.asarray(array)

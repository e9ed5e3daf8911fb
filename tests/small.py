"""A small problem with every feature of a large one: absent nodes, removed directions, a rank below d."""

import jax
import jax.numpy as jnp
import numpy as np

from geode_jax.math.lowrank import masked_gram
from geode_jax.math.uniforms import Uniforms
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.dictionary import Dictionary
from geode_jax.model.joint import sample_prior
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.problem import Problem
from geode_jax.model.state import State, node_sums
from geode_jax.model.statistics import statistics_of
from geode_jax.model.tree import tree_from_mask
from geode_jax.settings import DirectMembership, ExactShrinkage, GammaPrior, Prior

NUM_ROWS, NUM_FEATURES, MAX_RANK = 14, 5, 3

# For programs that run longer than they compile: with the passes of LLVM that conftest.py turns off.
OPTIMISED = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}

# Proper and light-tailed: every moment that the joint tests compare exists, and chains move fast.
PRIOR = Prior(
    tau_rate=0.5,
    noise_shape=6.0,
    noise_rate=4.0,
    noise_rows=0.7,
    stop_concentration=GammaPrior(6.0, 4.0),
    right_concentration=2.0,
)


def make_dictionary(dtype, depth=2, seed=0):
    """Depth 2 with the right child of the root a leaf: nodes 5 and 6 are absent."""
    rng = np.random.default_rng(seed)
    present = np.ones(2 ** (depth + 1) - 1, bool)
    if depth == 2:
        present[5:] = False
    nodes = present.size
    bases = np.linalg.qr(rng.normal(size=(nodes, NUM_FEATURES, MAX_RANK)))[0]
    ranks = np.where(present, MAX_RANK, 0)
    if nodes > 1:
        ranks[1] = 2
    bases *= (np.arange(MAX_RANK) < ranks[:, None])[:, None, :]
    centres = 1.5 * rng.normal(size=(nodes, NUM_FEATURES)) * present[:, None]
    return Dictionary(
        tree_from_mask(present), jnp.asarray(centres, dtype), jnp.asarray(bases, dtype), jnp.asarray(ranks, jnp.int32)
    )


def active_mask(dictionary):
    """All available directions but one."""
    mask = np.array(dictionary.is_available & dictionary.tree.is_present[:, None])
    mask[0, 1] = False
    return jnp.asarray(mask)


def free_parameters(dictionary, active, state, sums):
    """Smooth functions of every block with light tails, and the node counts; (functions,)."""
    is_present, is_leaf = np.asarray(dictionary.tree.is_present), np.asarray(dictionary.tree.is_leaf)
    internal, present = np.flatnonzero(is_present & ~is_leaf), np.flatnonzero(is_present)
    directions = tuple(np.argwhere(np.asarray(active)).T)
    return jnp.concatenate(
        [
            jnp.clip(state.logit_stop[internal], -20, 20),
            jnp.clip(state.logit_right[internal], -20, 20),
            state.log_sigma2,
            state.log_neg_log_u[directions],
            state.log_tau[directions],
            state.log_stop_concentration[None],
            sums.count[present],
        ]
    )


def make_borrowed(dictionary, seed=1):
    """Every node but the root borrows, another number of rows each; every scale has its own typical noise."""
    rng, dtype = np.random.default_rng(seed), dictionary.centres.dtype
    num_nodes, rank = dictionary.bases.shape[::2]
    count, signal = rng.uniform(1.0, 3.0, num_nodes), rng.uniform(1.0, 4.0, (num_nodes, rank))
    noise = rng.uniform(0.5, 1.5, dictionary.tree.num_scales)
    count[0] = 0.0
    count, signal, noise = (jnp.asarray(values, dtype) for values in (count, signal, noise))
    count = count * dictionary.tree.is_present
    return Borrowed(count, count[:, None] * signal * dictionary.is_available, noise)


def make_problem(dictionary, x, prior=PRIOR, shrinkage=None, membership=None):
    return Problem(
        tree=dictionary.tree,
        statistics=statistics_of(dictionary, x),
        partial=None,
        borrowed=make_borrowed(dictionary),
        is_available=dictionary.is_available & dictionary.tree.is_present[:, None],
        prior=prior,
        shrinkage=ExactShrinkage() if shrinkage is None else shrinkage,
        membership=DirectMembership() if membership is None else membership,
        num_features=dictionary.num_features,
    )


# Observed features of the rows with missing ones: every count of missing features from 1 to 4, below, at and above the
# rank, and one pattern twice.
MASK = np.array(
    [[0, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [1, 0, 1, 0, 1], [1, 1, 0, 0, 0]], float
)


def missing_root(is_missing, basis):
    """A root of the Gram matrix over the missing features.

    Where fewer features are missing than there are directions, it has one column per missing feature.
    """
    num_features, rank = basis.shape
    order = jax.lax.top_k(is_missing, min(rank, num_features))[1]
    taken = jnp.take_along_axis(is_missing, order, axis=1)
    by_feature = jnp.swapaxes(basis[order] * taken[..., None], -1, -2)
    by_feature = jnp.pad(by_feature, ((0, 0), (0, 0), (0, rank - order.shape[1])))
    ridge = (1e-5 if basis.dtype == jnp.float32 else 1e-10) * jnp.eye(rank, dtype=basis.dtype)
    factor = jnp.linalg.cholesky(masked_gram(is_missing, basis) + ridge)
    factor = jnp.any(basis != 0.0, axis=0)[:, None] * factor
    return jnp.where((is_missing.sum(axis=1) < rank)[:, None, None], by_feature, factor)


def make_partial_rows(dictionary, x, mask=MASK, num_groups=2):
    """Rows with missing features at all present nodes, without the package's code for building them.

    No Cholesky factor depends on x, so that it may stand beside the sampler's in one program.
    """
    nodes = np.flatnonzero(np.asarray(dictionary.tree.is_present))
    mask = jnp.asarray(mask, x.dtype)
    centred = mask[:, None] * (x[:, None] - dictionary.centres[nodes])
    basis = dictionary.bases[nodes]
    cross = jnp.einsum("bmD,mDd->bmd", centred, basis)
    start = 0.7 * cross + 0.1
    error = centred - mask[:, None] * jnp.einsum("mDd,bmd->bmD", basis, start)
    rows, rank = mask.shape[0], basis.shape[-1]
    gram, root = (
        jnp.stack([function(part, one) for one in basis], axis=1)
        for function, part in ((masked_gram, mask), (missing_root, 1 - mask))
    )

    def grouped(values, *shape):
        return jnp.reshape(jnp.asarray(values), (num_groups, -1, *shape))

    count = nodes.size
    return PartialRows(
        node=grouped(np.tile(nodes, (rows, 1)).astype(np.int32), count),
        entry=None,
        entry_node=grouped(np.tile(nodes, (rows, 1)).astype(np.int32)),
        gram=grouped(gram, rank, rank),
        root=grouped(root, rank, rank),
        cross=grouped(cross, count, rank),
        start=grouped(start, count, rank),
        remainder=grouped(jnp.einsum("bmD,mDd->bmd", error, basis), count, rank),
        residual=grouped(jnp.square(error).sum(axis=-1), count),
        num_observed=grouped(mask.sum(axis=1)),
        num_missing=grouped((1 - mask).sum(axis=1)),
    )


def without_rows(dictionary, prior=PRIOR):
    """A problem to draw parameters from the prior of; its one row is not used."""
    return make_problem(dictionary, jnp.zeros((1, NUM_FEATURES), dictionary.centres.dtype), prior)


def sums_of(problem: Problem, state: State):
    return node_sums(state, problem.statistics)


# One program: run call by call, it compiles a hundred.
draw_from_prior = jax.jit(sample_prior, static_argnames="num_rows")


def uniforms(key, dtype=jnp.float32):
    """Enough for any one update of the small problem's nodes."""
    return Uniforms(key, 64, dtype)


def keys(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def in_parts(run, size, *chains):
    """What a program makes of all chains, `size` at a time: it is compiled once where `size` divides their number."""
    number = jax.tree.leaves(chains)[0].shape[0]
    parts = [slice(first, first + size) for first in range(0, number, size)]
    ends = [run(*jax.tree.map(lambda leaf, part=part: leaf[part], chains)) for part in parts]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *ends)

"""Missing features given the observed ones, with which stage one refines its first fill.

A row is filled with its conditional mean and a random deviation from it, under the quick mixture of
`learning/evidence.py`, at its candidate nodes, from the dictionaries that left its fold out: a row must not be filled
from the values it was filled with just before. The deviation is that of a draw of the row's coordinates. Without it
the fills lack the variance that the observed features leave, and so do the directions learned from them; intervals
were too narrow. The noise is left out, as it has no direction.

A first fill may be shrunk towards the mean, and one round undoes only a part of that, least where few rows are
observed, as the dictionary is learned from the shrunk fills. So rounds, of one tree each, are repeated until the fills
hardly grow, much as in a stochastic EM algorithm; a last round over several trees follows.

Where the noise has a covariance, what is observed tells also of the noise of what is not. One more round then fills the
rows in whitened coordinates, where what they do not show is a part of no feature's own (`rows/unseen.py`).
"""

import itertools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geode_jax._runtime.blas import lapack_turn, one_blas_thread
from geode_jax._runtime.progress import ShowProgress, part_of
from geode_jax._typing import Array
from geode_jax.forest.partial_statistics import group_rows, reduce_rows
from geode_jax.forest.plan import Plan
from geode_jax.forest.trees import grow_trees
from geode_jax.learning.candidate_search import search_candidates
from geode_jax.learning.evidence import QuickMixture, cross_fitted_evidence, fit_quick_mixture
from geode_jax.learning.noise_covariance import (
    NoiseRoot,
    learn_covariances,
    learn_whitened_subspaces,
    whiten_training,
)
from geode_jax.learning.subspaces import SubspaceOptions, Subspaces, empty_subspaces, learn_subspaces
from geode_jax.math.lowrank import latent_from, log_marginal, posterior_system
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.partition.metis import Partition
from geode_jax.rows.blocks import slices
from geode_jax.rows.folds import Holdout, each_fold
from geode_jax.rows.training import Training
from geode_jax.rows.view import View, as_array

# Trees over which the conditional means of the last round are averaged.
FILL_TREES = 2
# Rounds before the last: until the fills' size (`_size`) grows by no more than this, and at most so many.
SETTLED, MOST_ROUNDS = 0.0025, 16
_LARGE_BLOCK = 4096  # rows whose matrices are held at once
_SYSTEMS = 256  # rows whose systems of equations are solved at once
# Holdouts, and a table (lines, partial rows) of which one of them fills each row, by number; -1 where none need.
_Fillers: TypeAlias = tuple[list[Holdout], np.ndarray]


def fill_conditionally(training: Training, plan: Plan, seeds: list[int], show: ShowProgress) -> Training:
    """Replace the first fill of missing entries, in rounds until the fills settle.

    A row is filled by dictionaries that left its fold out: one that was learned from the row would reproduce what the
    row was filled with before. And where rows are to train the dictionary without some fold, the last round fills them
    by dictionaries that left out that fold too, if there are more than two folds. Were this not done, that dictionary
    would depend on the fold's rows, and intervals would be too narrow. The first fill and the rounds before the last
    use all rows, and the last takes candidate nodes from dictionaries without the row's own fold only, and the
    parameters of nodes from all rows; a dependence through these remains.
    """
    own = _own_fillers(training)
    training = _settle(training, plan, seeds[0], own, part_of(show, 0.0, 0.5))
    filled = _fill(training, plan, seeds[:FILL_TREES], _fillers(training), part_of(show, 0.5, 1.0))
    return _refilled(training, filled[0])._replace(without=list(filled[1:]) or None)


def _settle(training: Training, plan: Plan, seed: int, own: _Fillers, show: ShowProgress) -> Training:
    """Rounds of one tree each, every round of another one, until the fills hardly grow."""
    size = _size(training)
    for number, tree_seed in enumerate(np.random.default_rng(seed).integers(2**31, size=MOST_ROUNDS).tolist()):
        show(number / MOST_ROUNDS, f"round {number + 1}")
        training = _refilled(training, _fill(training, plan, [tree_seed], [own], lambda *_: None)[0])
        before, size = size, _size(training)
        if size <= before + SETTLED:
            break
    return training


def _refilled(training: Training, rows: np.ndarray) -> Training:
    """With other values of the partial rows, (n_m, D)."""
    x = np.array(training.x)
    x[training.partial] = rows
    return training._replace(x=x)


def _size(training: Training) -> float:
    """What the filled entries add to the variance of the features that have any, in units of the observed one."""
    x, seen = as_array(training.x), training.mask
    filled_in = np.flatnonzero(~seen.all(axis=0) & seen.any(axis=0))  # a class may never show a feature
    parts = [filled_in[some] for some in slices(filled_in.size, len(x))]
    shares = np.concatenate([np.zeros(0), *(_shares(x[:, part], seen[:, part]) for part in parts)])
    return float(shares.mean()) if shares.size > 0 else 0.0


def _shares(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What the entries that were not seen add to the variance of those that were, for each feature of which these vary.

    A class may show only one value of a feature: what is filled in differs from it by rounding.
    """
    varies = np.max(x, axis=0, where=seen, initial=-np.inf) > np.min(x, axis=0, where=seen, initial=np.inf)
    x, seen = x[:, varies].astype(np.float64), seen[:, varies]
    squares = np.square(x - np.mean(x, axis=0, where=seen))  # means of a class may be far from 0
    observed = np.sum(squares, axis=0, where=seen) / seen.sum(axis=0)
    share: np.ndarray = np.mean(squares, axis=0, where=~seen) * (~seen).mean(axis=0) / observed
    return share


def _fill(
    training: Training,
    plan: Plan,
    seeds: list[int],
    fillers: list[_Fillers],
    show: ShowProgress,
) -> np.ndarray:
    """Partial rows filled with conditional means, averaged over a tree for every seed, and a deviation under the first.

    (lines, n_m, D): a line for each of the tables', with the same random numbers. The first of the `fillers` are
    :func:`_own_fillers`: nodes' parameters and rows' candidates come from these dictionaries for all lines. The
    dictionaries without two folds may have fewer directions.
    """
    partitions, scales = grow_trees(training, plan, seeds, show)
    scaled = training._replace(x=as_array(View(training.x, scales)))
    max_rank, folds = plan.max_rank, training.folds
    inside = scaled.in_row_space(max_rank)
    first = None
    if plan.seeks_rank:
        first = _learn_own(inside, partitions[0], plan.subspaces(max_rank, seeds[0]))
        max_rank = max(plan.least_rank, cross_fitted_evidence(inside, partitions[0], first).needed_rank())
    rows = training.partial
    num_lines = sum(len(table) for _, table in fillers)
    total = np.zeros((num_lines, rows.size, training.num_features), dtype=training.x.dtype)
    seen = training.mask[rows]
    level, normal = _random_numbers(seeds[0], rows.size, max_rank)
    for number, (partition, seed) in enumerate(zip(partitions, seeds, strict=True)):
        show(0.5 + 0.5 * number / len(seeds), "conditional means")
        options, line = plan.subspaces(max_rank, seed), 0
        own = _learn_own(inside, partition, options) if first is None else first.leading(max_rank)
        first = None
        mixture = fit_quick_mixture(inside, partition, own)
        candidates = search_candidates(inside, rows, partition, own, plan.partial_candidates)
        for holdouts, table in fillers:
            subspaces = own if line == 0 else learn_subspaces(inside.x, partition, options, folds, holdouts)
            if inside.axes is not None:
                is_needed = np.zeros(subspaces.bases.shape[:2], dtype=bool)
                lines, places = np.nonzero(table >= 0)
                is_needed[table[lines, places][:, None], candidates[places]] = True
                subspaces = subspaces.in_features(inside.axes, is_needed)
            for by in table:
                used = np.flatnonzero(by >= 0)
                if used.size > 0:  # or all rows with missing entries are in the fold that is left out
                    block = Training(scaled.x[rows[used]], training.num_features, by[used], seen[used])
                    means, drawn = conditional(block, mixture, subspaces, candidates[used], level[used], normal[used])
                    total[line, used] += means
                    if number == 0:
                        total[line, used] += len(partitions) * (drawn - means)
                line += 1
    total /= len(partitions)
    total *= scales
    np.copyto(total, training.x[rows], where=seen)
    return total


def _learn_own(training: Training, partition: Partition, options: SubspaceOptions) -> Subspaces:
    """A tree's dictionaries without each fold; that of all rows, which fills none that has a fold, is left zero."""
    x, folds, holdouts = training.x, training.folds, training.holdouts
    if folds is None:
        return learn_subspaces(x, partition, options, None)
    assert folds.min() >= 0
    centres, bases = empty_subspaces(len(holdouts), len(partition.cells), x.shape[1], options.max_rank, x.dtype)
    learned = learn_subspaces(x, partition, options, folds, holdouts[1:], (centres[1:], bases[1:]))
    return Subspaces(centres, bases, learned.ranks)


def _random_numbers(seed: int, num_rows: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What draws the rows' nodes, (n_m,), uniform, and their coordinates there, (n_m, d), normal."""
    rng = np.random.default_rng(seed)
    return rng.random(num_rows, dtype=np.float32), rng.standard_normal((num_rows, rank), dtype=np.float32)


def refill_whitened(
    training: Training,
    plan: Plan,
    partition: Partition,
    options: SubspaceOptions,
    roots: list[NoiseRoot],
    known: Subspaces | None = None,
) -> Training:
    """Rows filled once more, under the noise of these roots: of all rows, and without each fold.

    As :func:`fill_conditionally` does in its last round, of one tree that is grown already: with two, fills of Frey
    faces were better by half a per cent, in twice the time. `known`: the tree's dictionaries of the rows, whitened by
    the roots, with as many directions as the options say or more.
    """
    rows, seen = training.partial, training.mask[training.partial]
    level, normal = _random_numbers(options.seed, rows.size, options.max_rank)
    if known is None:
        (known,) = learn_whitened_subspaces(training, roots, [(partition, options)])
    own = known.leading(options.max_rank)
    whitened = whiten_training(training._replace(x=np.array(training.x)), roots)
    mixture = fit_quick_mixture(whitened, partition, own)
    candidates = search_candidates(whitened, rows, partition, own, plan.partial_candidates)
    del whitened
    lines: list[np.ndarray] = []
    for holdouts, table in _fillers(training):
        these, subspaces = roots, own
        if lines:
            every = learn_covariances(training, [*training.holdouts, *holdouts]).roots(roots[0].deviation)
            these = every[len(roots) :]
            (subspaces,) = learn_whitened_subspaces(training, these, [(partition, options)], holdouts=holdouts)
        for by in table:
            line = np.array(training.x[rows])
            used = np.flatnonzero(by >= 0)  # the others are in the fold that is left out
            if used.size > 0:
                part = Training(line[used], training.num_features, by[used], seen[used])
                block = whiten_training(part, [these[0], *these])  # the first is for rows in no fold
                _, drawn = conditional(block, mixture, subspaces, candidates[used], level[used], normal[used])
                line[used] = np.where(seen[used], line[used], _unwhitened(block, drawn, these))
            lines.append(line)
    return _refilled(training, lines[0])._replace(without=lines[1:] or None)


def _unwhitened(block: Training, mean: np.ndarray, roots: list[NoiseRoot]) -> np.ndarray:
    """Whitened rows with what they do not show taken from `mean`, in the coordinates that they were whitened from."""
    assert block.unseen is not None
    found = mean + block.unseen.shown(np.arange(len(mean)), as_array(block.x) - mean)
    for number in np.unique(block.own_folds):
        inside = block.own_folds == number
        found[inside] = found[inside] @ (roots[number].unit * roots[number].matrix).astype(found.dtype)
    return found


def _own_fillers(training: Training) -> _Fillers:
    """For the dictionary of all rows, one line: a row is filled by the dictionary that left its fold out."""
    return each_fold(training.folds), training.holdouts_of(training.partial)[None]


def _fillers(training: Training) -> list[_Fillers]:
    """:func:`_own_fillers`, and a line for each dictionary without a fold: by one that left out the row's fold too.

    These lines have dictionaries of their own. All dictionaries that are learned together get the smallest rank, and
    those without two folds have the fewest rows. With two folds no rows would be left, and there are no such lines.
    """
    holdouts, own_line = _own_fillers(training)
    own, num_folds = (own_line[0] - 1).tolist(), len(holdouts) - 1
    if num_folds <= 2:
        return [(holdouts, own_line)]
    pairs: list[Holdout] = list(itertools.combinations(range(num_folds), 2))
    number_of = {pair: number for number, pair in enumerate(pairs)}
    lines = [[number_of.get((min(fold, other), max(fold, other)), -1) for other in own] for fold in range(num_folds)]
    return [(holdouts, own_line), (pairs, np.array(lines))]


def conditional(
    rows: Training,
    mixture: QuickMixture,
    subspaces: Subspaces,
    candidates: np.ndarray,
    level: np.ndarray,
    normal: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Every feature of the rows given the observed ones: its mean, (n_m, D), and that at a draw of the coordinates.

    Computed in blocks of rows. The folds of the `rows` are the numbers of the holdouts of `subspaces` that fill them.
    `level` (n_m,), uniform in (0, 1), draws the node, and `normal` (n_m, d) the coordinates there.
    """
    found = []
    for start in range(0, rows.x.shape[0], _LARGE_BLOCK):
        at = np.arange(start, min(start + _LARGE_BLOCK, rows.x.shape[0]))
        found.append(_of_block(rows.taken(at), mixture, subspaces, candidates[at], level[at], normal[at]))
    means, drawn = zip(*found, strict=True)
    return np.concatenate(means), np.concatenate(drawn)


@one_blas_thread()
def _of_block(
    rows: Training,
    mixture: QuickMixture,
    subspaces: Subspaces,
    candidates: np.ndarray,
    level: np.ndarray,
    normal: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    x, own = as_array(rows.x), rows.own_folds
    grouping = group_rows(rows.mask, own, -(-x.shape[0] // _SYSTEMS))
    centres, bases = subspaces.centres, subspaces.bases
    reduced = reduce_rows((centres, bases), rows, candidates, grouping, with_root=False)
    place = np.searchsorted(mixture.nodes, candidates)
    ratio = np.where(mixture.has_direction, mixture.variance / mixture.noise[:, None], 1.0)
    parameters = (np.log(ratio), np.log(mixture.noise), mixture.log_weight)
    rank = bases.shape[3]
    weight, eta = np.empty(candidates.shape, x.dtype), np.empty((*candidates.shape, rank), x.dtype)
    chosen, eta_drawn = np.empty(x.shape[0], int), np.empty((x.shape[0], rank), x.dtype)
    stores = (weight, eta, chosen, eta_drawn)
    for number, members in enumerate(grouping.rows):
        here, padded = members[members >= 0], np.maximum(members, 0)
        one = PartialRows(**jax.device_put(jax.tree.map(lambda leaf, at=number: leaf[at : at + 1], reduced)))
        tables = [table[place[padded]] for table in parameters] + [level[padded], normal[padded, :rank]]
        with lapack_turn(jax.default_backend()):
            found = jax.tree.map(np.asarray, _conditional(one, *(table.astype(x.dtype) for table in tables)))
        for store, leaf in zip(stores, found, strict=True):
            store[here] = leaf[: here.size]
    mean, drawn = np.zeros_like(x), np.zeros_like(x)
    for number in np.unique(own):
        for node in np.unique(candidates[own == number]):
            row, slot = np.nonzero((candidates == node) & (own == number)[:, None])
            centre, basis = centres[number, node], bases[number, node]
            mean[row] += weight[row, slot][:, None] * (centre + eta[row, slot] @ basis.T)
            row = row[chosen[row] == slot]
            drawn[row] = centre + eta_drawn[row] @ basis.T
    return mean, drawn


@jax.jit
def _conditional(
    rows: PartialRows, neg_log_u: Array, log_noise: Array, log_weight: Array, level: Array, normal: Array
) -> tuple[Array, Array, Array, Array]:
    """Posterior weights of the candidates and mean coordinates at each; a draw of one, and of the coordinates there.

    The rows are one group. neg_log_u = log(variance / noise).
    """
    group = jax.tree.map(lambda leaf: leaf[0], rows)
    observed = group.observed(group.at_candidates(group.gram))
    amplitude, factor = posterior_system(observed.gram, neg_log_u, observed.start)
    latent = latent_from(amplitude, factor, observed.cross)
    weight = jax.nn.softmax(log_weight + log_marginal(observed, latent, neg_log_u, log_noise), axis=1)
    slot = jnp.sum(jnp.cumsum(weight, axis=1)[:, :-1] <= level[:, None], axis=1)

    def chosen(values: Array) -> Array:
        return jax.vmap(lambda row, at: row[at])(values, slot)

    half = lax.linalg.triangular_solve(chosen(factor), normal[..., None], left_side=True, lower=True, transpose_a=True)[
        ..., 0
    ]
    spread = jnp.exp(0.5 * chosen(log_noise))[:, None] * chosen(amplitude)
    return weight, latent.mean, slot, chosen(latent.mean) + spread * half

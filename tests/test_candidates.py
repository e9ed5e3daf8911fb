"""Rows that may be at a few nodes each: exact where these are all nodes, and nothing hidden where they are not."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DICTIONARY, SAMPLER
from scipy import special
from small import NUM_ROWS, make_dictionary, make_problem

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import learn
from geode_jax.forest.forest import Forest
from geode_jax.forest.plan import Plan
from geode_jax.gibbs import membership
from geode_jax.gibbs.chain import initial_chain
from geode_jax.gibbs.sweep import sweep
from geode_jax.learning import candidate_search
from geode_jax.learning.candidate_search import search_candidates
from geode_jax.learning.evidence import HeldOutStatistics, cell_mixture, statistics_at
from geode_jax.learning.subspaces import SubspaceOptions, learn_subspaces
from geode_jax.model import candidate_statistics
from geode_jax.model.candidate_statistics import BLOCK, CandidateStatistics, lay_out, reshard
from geode_jax.partition.metis import partition_rows
from geode_jax.partition.neighbours import neighbour_graph
from geode_jax.rows.folds import assign_folds
from geode_jax.rows.training import Training
from geode_jax.settings import SliceMembership

FEW = dataclasses.replace(DICTIONARY, num_candidates=4)


def _at_candidates(dense, node, num_nodes):
    """Dense statistics of one tree as those of candidates `node`, (M, n), K where a row has no more."""
    layout = lay_out(node, num_nodes, 1)
    residual = np.full(layout.row.shape, 77.0, dense.residual.dtype)  # rubbish at empty places
    squared = np.full((*layout.row.shape, dense.squared.shape[-1]), 99.0, dense.residual.dtype)
    at_pair = np.repeat(layout.block_node, BLOCK, axis=1)
    is_pair = layout.row >= 0
    pairs = at_pair[is_pair], layout.row[is_pair]
    residual[is_pair], squared[is_pair] = np.asarray(dense.residual)[pairs], np.asarray(dense.squared)[pairs]
    return CandidateStatistics(
        jnp.asarray(residual),
        jnp.asarray(squared),
        jnp.asarray(layout.block_node),
        jnp.asarray(node, jnp.int32),
        jnp.asarray(layout.position),
        jnp.asarray(dense.num_rows),
    )


def _small(membership=None, width=None):
    """The small problem, and the same with candidates: all present nodes, or `width` random ones."""
    dictionary = make_dictionary(np.float64)
    x = 2.0 * jax.random.normal(jax.random.key(0), (NUM_ROWS, dictionary.num_features), np.float64)
    problem = make_problem(dictionary, x, membership=membership)
    num_nodes = dictionary.tree.num_nodes
    present = np.flatnonzero(np.asarray(dictionary.tree.is_present))
    rng = np.random.default_rng(1)
    node = np.full((num_nodes, NUM_ROWS), num_nodes)
    for row in range(NUM_ROWS):
        chosen = np.sort(rng.choice(present, width or present.size, replace=False))
        node[: chosen.size, row] = chosen
    few = _at_candidates(problem.statistics, node, num_nodes)
    return problem, eqx.tree_at(lambda it: it.statistics, problem, few), node


@pytest.mark.parametrize("membership", [None, pytest.param(SliceMembership(), marks=pytest.mark.slow)])
def test_all_nodes_as_candidates_draw_the_same(membership):
    """Same start, same draws, same sums, sweep after sweep; empty places and absent nodes change nothing."""
    with jax_settings(np.float64):
        dense, few, _ = _small(membership)
        chains = [jax.jit(initial_chain)(jax.random.key(1), problem) for problem in (dense, few)]
        states = [(chain.state, chain.sums) for chain in chains]
        run, visited = jax.jit(sweep), set()
        for index in range(5):
            for found, expected in zip(jax.tree.leaves(states[1]), jax.tree.leaves(states[0]), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-8)
            key = jax.random.key(10 + index)
            states = [run(key, *state, problem) for state, problem in zip(states, (dense, few), strict=True)]
            visited.update(np.asarray(states[0][0].node).tolist())
        assert len(visited) > 2


def test_memberships_follow_the_conditional_over_candidates():
    """4000 draws against the probabilities at all nodes, with the others' set to zero: largest of 70 z statistics."""
    with jax_settings(np.float64):
        dense, few, node = _small(width=3)
        tree, count = dense.tree, dense.num_features
        state = jax.jit(initial_chain)(jax.random.key(1), few).state
        keys = jax.random.split(jax.random.key(2), 4000)
        drawn = jax.jit(jax.vmap(lambda key: membership.draw(key, state, few.statistics, tree, count)))(keys)
        scores = np.array(membership.node_scores(state, dense.statistics, tree, count))
        log_conditional = membership.log_conditional(state, few.statistics, tree, count)
    is_candidate = (node[:, None] == np.arange(tree.num_nodes)[:, None]).any(axis=0)
    probability = special.softmax(np.where(is_candidate, scores, -np.inf), axis=0)
    share = np.stack([(np.asarray(drawn) == k).mean(axis=0) for k in range(tree.num_nodes)])
    assert share[~is_candidate].max() == 0.0
    error = np.sqrt(probability * (1 - probability) / 4000)
    assert np.abs(share - probability).max() < 1e-9 + (4.5 * error).max()
    assert (np.abs(share - probability) <= 4.5 * error + 1e-3).all()
    own = np.log(probability[np.asarray(state.node), np.arange(NUM_ROWS)]).sum()
    assert float(log_conditional) == pytest.approx(own, rel=1e-9)


@pytest.mark.parametrize("num_shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_groups_of_rows_change_nothing(num_shards):
    with jax_settings(np.float64):
        _, few, _ = _small(width=3)
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), few.statistics)
        grouped = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), reshard(stacked, few.tree.num_nodes, num_shards))
        assert grouped.residual.shape[0] == num_shards
        state = jax.jit(initial_chain)(jax.random.key(1), few).state
        for mine, theirs in zip(grouped.at(state.node), few.statistics.at(state.node), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        scores = [membership.node_scores(state, it, few.tree, few.num_features) for it in (grouped, few.statistics)]
        np.testing.assert_allclose(*scores, rtol=1e-12)


@pytest.fixture(scope="module")
def forests(data):
    """The same trees with all nodes, and with four candidates per row."""
    return [geode_jax.learn_forest(jax.random.key(0), data, dictionary=settings) for settings in (DICTIONARY, FEW)]


def test_statistics_and_probe_are_those_of_all_nodes(forests, data):
    dense, few = forests
    assert isinstance(few.statistics, CandidateStatistics)
    for tree in range(2):
        parts = (dense.statistics, few.statistics, few.probe)
        whole, own, probe = (jax.tree.map(lambda leaf, at=tree: leaf[at], part) for part in parts)
        nodes = np.asarray(own.node)[:, : len(data)]
        assert (np.diff(nodes, axis=0) > 0).all()
        for candidate in own.node:
            for found, expected in zip(own.at(candidate), whole.at(candidate), strict=True):
                np.testing.assert_allclose(found[: len(data)], expected[: len(data)], rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(probe.residual, whole.residual[:, : len(data)], rtol=1e-5)
        np.testing.assert_array_equal(probe.is_candidate, (nodes[:, None] == np.arange(7)[:, None]).any(axis=0))


@pytest.mark.slow
def test_lost_mass_is_what_the_other_nodes_would_have(forests):
    """By the posterior's own draws; what was found by the candidates' own mixture would say nothing is lost."""
    few = forests[1]
    posterior = geode_jax.sample_posterior(jax.random.key(1), few, sampler=SAMPLER)
    scale = np.asarray(few.dictionary.tree.scale)
    draws = posterior.thin(100)
    lost = np.zeros(2)
    for tree in range(2):
        probe, own = (
            jax.tree.map(lambda leaf, at=tree: np.asarray(leaf[at], np.float64), it) for it in (few.probe, draws)
        )
        sigma2 = np.exp(own.log_sigma2)[:, scale]
        quadratic = probe.residual + np.einsum("knd,tkd->tkn", probe.squared, np.exp(-own.neg_log_u))
        constant = own.log_weights - 3.0 * np.log(sigma2) - 0.5 * own.neg_log_u.sum(axis=2)
        probability = special.softmax(constant[..., None] - 0.5 * quadratic / sigma2[..., None], axis=1)
        lost[tree] = np.where(probe.is_candidate, 0.0, probability).sum(axis=1).mean()
    assert lost.min() > 1e-5
    np.testing.assert_allclose(posterior.lost_mass, lost, rtol=1e-3)


@pytest.mark.slow
def test_nothing_is_lost_on_the_way_to_a_file(forests, data, tmp_path):
    few = forests[1]
    again = Forest.from_archive(*few.to_archive())
    assert eqx.tree_equal(again, few)
    posterior = geode_jax.sample_posterior(jax.random.key(0), few, sampler=SAMPLER)
    posterior.save(tmp_path / "few.npz")
    np.testing.assert_array_equal(geode_jax.Posterior.load(tmp_path / "few.npz").lost_mass, posterior.lost_mass)
    held_out = geode_jax.held_out_log_density(few, posterior)
    assert held_out.shape == (len(data),)
    assert np.isfinite(held_out).all()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["some rows", "all rows"])
def test_with_missing_features(data, hidden):
    """Complete rows have candidates, partial rows theirs; without complete rows there is nothing to leave out."""
    rows = data.copy()
    index = np.arange(0, len(rows), 3) if hidden == "some rows" else np.arange(len(rows))
    rows[index, index % 6] = np.nan
    posterior = geode_jax.fit(jax.random.key(0), rows, dictionary=FEW, sampler=SAMPLER)
    assert np.isfinite(geode_jax.log_density(posterior, data)).all()
    assert (posterior.lost_mass is None) == (hidden == "all rows")
    assert (posterior.draws.count.sum(axis=-1) == len(rows)).all()


def _curve(num_rows=600):
    rng = np.random.default_rng(0)
    t = rng.uniform(0, 2 * np.pi, num_rows)
    x = np.stack([np.cos(t), np.sin(t), np.cos(2 * t), np.sin(3 * t)], axis=1) @ rng.normal(size=(4, 10))
    return (x + 0.05 * rng.normal(size=x.shape)).astype(np.float32)


@pytest.mark.parametrize("width", [3, 5, 31])
def test_search_finds_the_best_nodes(width, monkeypatch):
    """Against all nodes' scores: every row's best one, and nearly all of the best `width`. In parts, too."""
    x = _curve()
    folds = assign_folds(len(x), 4, np.random.default_rng(0))
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 4, 10, 0)
    subspaces = learn_subspaces(x, partition, SubspaceOptions(2, 0), folds)
    rows = np.arange(0, len(x), 2)
    training = Training(x, 10, folds)
    found = search_candidates(training, rows, partition, subspaces, width)
    for at_once, numbers in ((7, 10**6), (10**6, 70)):
        monkeypatch.setattr(candidate_search, "SEARCHED_AT_ONCE", at_once)
        monkeypatch.setattr(candidate_search, "_BLOCK_NUMBERS", numbers)
        assert candidate_search.searched_at_once(training) == 7
        np.testing.assert_array_equal(search_candidates(training, rows, partition, subspaces, width), found)
    mixture = cell_mixture(training, partition, subspaces)
    statistics = statistics_at(training, rows, subspaces, mixture.nodes)
    count = np.full(rows.size, 10)
    held_out = HeldOutStatistics(mixture.nodes, *statistics, mixture.has_direction, count, 10)
    scores = mixture.log_densities(held_out).T
    order = mixture.nodes[np.argsort(-scores, axis=1)][:, :width]
    assert found.shape == (rows.size, min(width, mixture.nodes.size))
    assert (np.diff(found, axis=1) > 0).all()
    assert (found == order[:, :1]).any(axis=1).mean() > 0.99
    assert (found[:, :, None] == order[:, None]).any(axis=1).mean() > 0.97


@pytest.mark.parametrize("width", [16, 40, 100])
def test_as_many_candidates_as_are_asked_for(width):
    """In a deep tree, where the search leaves out most nodes."""
    x = _curve(1500)
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 7, 2, 0)
    training = Training(x, 10, assign_folds(len(x), 4, np.random.default_rng(0)))
    subspaces = learn_subspaces(x, partition, SubspaceOptions(2, 0), training.folds)
    assert partition.is_present.sum() > 200
    found = search_candidates(training, np.arange(0, 1500, 5), partition, subspaces, width)
    assert found.shape == (300, width)
    assert found.min() >= 0
    assert (np.diff(found, axis=1) > 0).all()


def test_search_by_what_is_observed():
    """Hidden features leave the residual and the count: the best nodes, of which some are others than of whole rows."""
    x = _curve()
    folds = assign_folds(len(x), 4, np.random.default_rng(0))
    partition = partition_rows(x, neighbour_graph(x, 10, 0), 3, 10, 0)
    subspaces = learn_subspaces(x, partition, SubspaceOptions(2, 0), folds)
    is_observed = np.ones(x.shape, bool)
    is_observed[::5, 4:] = False
    rows = np.arange(0, len(x), 5)
    training = Training(x, x.shape[1], folds, is_observed)
    found = search_candidates(training, rows, partition, subspaces, 3)
    mixture = cell_mixture(training, partition, subspaces)
    best = []
    for own in (training, training._replace(is_observed=None)):
        statistics = statistics_at(own, rows, subspaces, mixture.nodes)
        count = np.full(rows.size, 10 if own.is_observed is None else 4)
        held_out = HeldOutStatistics(mixture.nodes, *statistics, mixture.has_direction, count, 10)
        scores = mixture.log_densities(held_out)
        best.append(np.sort(mixture.nodes[np.argsort(-scores.T, axis=1)[:, :3]], axis=1))
    assert (found == best[0]).mean() > 0.99
    assert (best[0] != best[1]).mean() > 0.1


def test_positions_that_int32_cannot_hold_are_refused(data, monkeypatch):
    """Before most of the work is done, rather than positions that have overflowed."""
    with pytest.raises(ValueError, match=r"num_candidates: expected rows times candidates within 2\.1e"):
        candidate_statistics.num_blocks_of(32 * 70_000_000, 127)
    monkeypatch.setattr(candidate_statistics, "MOST_PLACES", 300)
    monkeypatch.setattr(learn, "freeze_forest", None)  # it is not reached
    with pytest.raises(ValueError, match="num_candidates"):
        geode_jax.fit(jax.random.key(0), data, dictionary=FEW, sampler=SAMPLER)


def test_default_keeps_statistics_within_memory():
    def candidates(num_rows, num_features, **settings):
        plan = Plan.of(geode_jax.DictionarySettings(**settings), num_rows, num_features)
        return plan.num_candidates(plan.max_rank), plan.tree.depth

    assert candidates(300, 50) == (31, 4)  # all nodes of a small tree
    assert candidates(1000, 50) == (16, 6)
    assert candidates(1000, 50, num_candidates=999)[0] == 127
    assert candidates(1000, 1) == (127, 6)  # of one feature all
    assert candidates(100_000, 784) == (8, 7)  # more do not fit at 100 directions
    assert candidates(10_000_000, 784)[0] == 8
    with pytest.raises(ValueError, match="num_candidates: expected an integer of at least 1, got 0"):
        geode_jax.DictionarySettings(num_candidates=0)


def test_default_rank_keeps_matrices_of_partial_rows_within_memory():
    for width in (None, 3):
        settings = geode_jax.DictionarySettings(missing_rows=geode_jax.MissingRows(num_candidates=width))
        found = Plan.of(settings, 20_000, 784, num_partial=20_000)
        bytes_of = 8 * settings.num_trees * 20_000 * (width or 6)
        assert bytes_of * found.max_rank**2 <= 2**32 < bytes_of * (found.max_rank + 1) ** 2
    # a thousand rows: as many as are still quick
    ranks = [
        Plan.of(geode_jax.DictionarySettings(), 1000, 560, number).max_rank for number in (0, 100, 500, 1000, 2000)
    ]
    assert ranks == [100, 100, 74, 52, 50]

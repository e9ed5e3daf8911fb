"""Fits to data with missing values: patterns of every kind, what is shared, and what must not depend on what."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import SAMPLER
from numpyro.infer import MCMC

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import fill
from geode_jax.forest.plan import Plan
from geode_jax.gibbs.chain import initial_chain
from geode_jax.gibbs.sweep import sweep
from geode_jax.interop.numpyro import GeodeKernel
from geode_jax.learning import evidence, factor_fill, first_fill, soft_impute
from geode_jax.learning.factor_fill import fill_by_factors, learn_factors, means_given
from geode_jax.learning.first_fill import fill_low_rank, hold_out
from geode_jax.learning.soft_impute import _rows_by_components, choose_threshold, fill_by_soft_impute
from geode_jax.partition.metis import Partition
from geode_jax.rows.training import Training

DICTIONARY = geode_jax.DictionarySettings(
    num_trees=2,
    max_rank=3,
    depth=2,
    min_cell_size=10,
    shared_span=None,
    missing_rows=geode_jax.MissingRows(num_candidates=5, num_groups=1),
)
MOST_ROUNDS = fill.MOST_ROUNDS


def _hide(data, kind):
    """Six complete rows, all others with missing features: kinds without common patterns share a compilation."""
    rng = np.random.default_rng(1)
    n = len(data)
    hidden = np.zeros(data.shape, bool)
    if kind == "at random":
        hidden = rng.random(data.shape) < 0.3
    elif kind == "column nearly empty":
        hidden[:, 3] = rng.random(n) < 0.9
    elif kind == "blocks":
        hidden[: n // 2, :3] = True
        hidden[n // 2 :, 3:] = True
    elif kind == "monotone":
        hidden = np.arange(6) >= rng.integers(1, 6, size=n)[:, None]
    elif kind == "one pattern":
        hidden[:, [1, 4]] = True
    elif kind == "one value per row":
        hidden = np.arange(6) != rng.integers(6, size=n)[:, None]
    is_full = ~hidden.any(axis=1)
    hidden[is_full, rng.integers(6, size=is_full.sum())] = True
    hidden[:6] = False
    return np.where(hidden, np.nan, data)


# independent of each other, or nearly unseen: the data say little of how these hang together
POOR = {"blocks", "one value per row"}


@pytest.mark.parametrize(
    "kind",
    [
        "at random",
        pytest.param("monotone", marks=pytest.mark.slow),
        pytest.param("one value per row", marks=pytest.mark.slow),
        pytest.param("one pattern", marks=pytest.mark.slow),
        pytest.param("blocks", marks=pytest.mark.slow),
        pytest.param("column nearly empty", marks=pytest.mark.slow),
    ],
)
def test_patterns(data, kind, best, fitted):
    """Better than independent features, by a share of what the same rows gain without missing values."""
    hidden = _hide(data, kind)
    posterior = fitted(kind)
    assert np.isfinite(geode_jax.log_density(posterior, hidden)).all()
    complete = geode_jax.log_density(posterior, data)
    assert np.isfinite(complete).all()
    gaussian = -0.5 * (6 * np.log(2 * np.pi) + np.log(data.var(axis=0)).sum() + 6)
    gained = (complete.mean() - gaussian) / (best - gaussian)
    print(f"{kind}: {gained:.0%} of the gain without missing values")
    assert gained > (-0.5 if kind in POOR else 0.2)


@pytest.fixture(scope="module")
def fitted(data):
    """A fit to rows with values missing of a kind."""

    def fit(kind):
        return geode_jax.fit(jax.random.key(0), _hide(data, kind), dictionary=DICTIONARY, sampler=SAMPLER)

    return functools.cache(fit)


@pytest.fixture(scope="module")
def best(data):
    posterior = geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    return geode_jax.log_density(posterior, data).mean()


def test_missing_features_are_filled_well(data, fitted):
    """Against the mean of each column; the observed values of a filled row stay as they are."""
    hidden = _hide(data, "at random")
    filled = geode_jax.impute_mean(fitted("at random"), hidden)
    missing = np.isnan(hidden)
    np.testing.assert_array_equal(filled[~missing], data[~missing])
    by_column = np.broadcast_to(np.nanmean(hidden, axis=0), data.shape)
    assert np.abs(filled - data)[missing].mean() < 0.5 * np.abs(by_column - data)[missing].mean()


@pytest.mark.slow
def test_draws_do_not_depend_on_segments(data):
    """Nor does what is drawn before a segment."""
    hidden = _hide(data, "at random")
    fits = [
        geode_jax.fit(
            jax.random.key(0),
            hidden,
            dictionary=dataclasses.replace(DICTIONARY, missing_rows=geode_jax.MissingRows(num_groups=3)),
            sampler=dataclasses.replace(SAMPLER, num_warmup=14, num_samples=14, segment_length=length),
        )
        for length in (7, 4)
    ]
    np.testing.assert_array_equal(*(found.draws.count for found in fits))
    np.testing.assert_allclose(*(found.draws.log_sigma2 for found in fits), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_both_types_and_settings(data):
    hidden = _hide(data, "at random")
    missing_rows = geode_jax.MissingRows(num_candidates=7, num_groups=3)
    settings = dataclasses.replace(DICTIONARY, missing_rows=missing_rows)
    fits = [
        geode_jax.fit(jax.random.key(0), hidden, dictionary=settings, sampler=SAMPLER, dtype=dtype)
        for dtype in ("float32", "float64", "float64")
    ]
    np.testing.assert_array_equal(fits[1].draws.log_joint, fits[2].draws.log_joint)
    values = [geode_jax.log_density(posterior, data).mean() for posterior in fits[:2]]
    assert abs(values[0] - values[1]) < 1.0
    published = geode_jax.fit(
        jax.random.key(0),
        hidden,
        dictionary=geode_jax.DictionarySettings.published(max_rank=3, depth=2),
        sampler=geode_jax.SamplerSettings(num_warmup=20, num_samples=10, shrinkage=geode_jax.PublishedShrinkage()),
    )
    assert np.isfinite(geode_jax.log_density(published, data)).all()


@pytest.mark.slow
def test_groups_candidates_and_shared_matrices(data):
    """All rows have their place; rows that miss the same features share matrices, others do not."""
    for kind, is_shared in (("one pattern", True), ("at random", False)):
        hidden = _hide(data, kind)
        rows = geode_jax.learn_forest(jax.random.key(0), hidden, dictionary=DICTIONARY).partial
        assert (rows.entry is not None) == is_shared, kind
        num_partial = np.isnan(hidden).any(axis=1).sum()
        assert (np.asarray(rows.node[..., 0]) < 7).sum() == 2 * num_partial
    forest = geode_jax.learn_forest(jax.random.key(0), hidden, dictionary=DICTIONARY)
    assert forest.num_rows == len(data)


@pytest.mark.slow
def test_waiting_groups_keep_their_rows(data):
    settings = dataclasses.replace(DICTIONARY, num_trees=1, missing_rows=geode_jax.MissingRows(num_groups=3))
    forest = geode_jax.learn_forest(jax.random.key(0), _hide(data, "at random"), dictionary=settings)
    problem = forest.problem(geode_jax.Prior(), SAMPLER)
    problem = jax.tree.map(lambda leaf: leaf[0], problem)
    chain = initial_chain(jax.random.key(1), problem)
    state, sums = chain.state, chain.sums
    for turn in range(4):
        before = np.asarray(state.partial.residual)
        state, sums = sweep(jax.random.key(turn), state, sums, problem)
        changed = (np.asarray(state.partial.residual) != before).any(axis=1)
        np.testing.assert_array_equal(changed, np.arange(3) == turn % 3)
    assert float(sums.count.sum()) == len(data)


@pytest.mark.slow
def test_the_sweep_knows_nothing_of_the_number_of_features():
    """Arrays of a problem have the same shapes for 30 and for 300 features, whatever the share that is missing."""
    shapes = []
    for num_features, share in ((30, 0.2), (300, 0.2), (300, 0.6)):
        rng = np.random.default_rng(0)
        data = rng.normal(size=(80, 2)) @ rng.normal(size=(2, num_features)) + 0.1 * rng.normal(size=(80, num_features))
        hidden = np.where(rng.random(data.shape) < share, np.nan, data)
        hidden[:, 0], hidden[:, 1] = data[:, 0], np.nan
        hidden[0, 1] = data[0, 1]
        hidden[0, 2] = np.nan
        settings = geode_jax.DictionarySettings(
            num_trees=1,
            max_rank=2,
            depth=1,
            min_cell_size=10,
            shared_span=None,
            missing_rows=geode_jax.MissingRows(num_candidates=3, num_groups=1),
        )
        problem = geode_jax.learn_forest(jax.random.key(0), hidden, dictionary=settings).problem(
            geode_jax.Prior(), SAMPLER
        )
        shapes.append([leaf.shape for leaf in jax.tree.leaves(problem)])
    assert shapes[0] == shapes[1] == shapes[2]


def _first_result(function):
    """The function, which after its first call returns the same again."""
    results = []

    def held(*arguments):
        if not results:
            results.append(function(*arguments))
        return results[0]

    return held


@pytest.fixture
def filled(data, monkeypatch):
    """Rows with a first fill, their folds, mask and plan; the trees, mixtures and candidates are held."""
    hidden = _hide(data, "at random").astype(np.float32) / 10 - 4
    is_observed = ~np.isnan(hidden)
    cells = Partition(1, (np.arange(90), np.arange(45), np.arange(45, 90)))
    monkeypatch.setattr(fill, "grow_trees", lambda *_: ([cells], np.ones(6)))
    for name in ("fit_quick_mixture", "search_candidates"):
        monkeypatch.setattr(fill, name, _first_result(getattr(fill, name)))
    rows = fill_low_rank(hidden, is_observed, 3, 0)
    return Training(rows, 6, np.arange(len(data)) % 3, is_observed), Plan.of(DICTIONARY, *data.shape)


def _with_moved_fold(training, fold=0):
    """The same rows, with those of one fold moved."""
    moves = (training.folds == fold)[:, None]
    return training._replace(x=np.where(moves, training.x + 1, training.x).astype(np.float32))


@pytest.mark.parametrize("fold", [0, 2])
def test_what_a_fold_is_measured_by_does_not_know_its_rows(filled, fold, monkeypatch):
    """Its rows move; what the others are filled with for the dictionary without it stays, bit for bit.

    The trees, the first fill with its rounds, the rank and the mixture's parameters are held: these are learned from
    all rows.
    """
    training, plan = filled
    monkeypatch.setattr(fill, "MOST_ROUNDS", 0)
    with jax_settings(np.float32):
        first, second = (
            fill.fill_conditionally(rows, plan, [0], lambda *_: None)
            for rows in (training, _with_moved_fold(training, fold))
        )
    others, rest = training.folds != fold, training.folds == 2 - fold
    np.testing.assert_array_equal(first.without_fold(fold)[others], second.without_fold(fold)[others])
    assert not np.array_equal(first.x[others], second.x[others])
    assert not np.array_equal(first.without_fold(1)[rest], second.without_fold(1)[rest])


def test_a_round_does_not_fill_a_row_from_its_own_fill(filled, monkeypatch):
    """Fills of fold 0 move; what a round fills these rows with stays, bit for bit."""
    training, plan = filled
    monkeypatch.setattr(fill, "MOST_ROUNDS", 1)
    fillers = fill._own_fillers(training)
    moved = np.where(training.is_observed, training.x, _with_moved_fold(training).x)
    with jax_settings(np.float32):
        first, second = (
            fill._settle(training._replace(x=x), plan, 0, fillers, lambda *_: None).x for x in (training.x, moved)
        )
    moves = training.folds == 0
    np.testing.assert_array_equal(first[moves], second[moves])
    assert not np.array_equal(first[~moves], second[~moves])


def test_fills_are_averaged_over_trees(filled, monkeypatch):
    """Twice the same tree fills as one does."""
    training, plan = filled
    cells = Partition(1, (np.arange(90), np.arange(45), np.arange(45, 90)))
    monkeypatch.setattr(fill, "grow_trees", lambda training, plan, seeds, show: ([cells] * len(seeds), np.ones(6)))
    with jax_settings(np.float32):
        once, twice = (
            fill._fill(training, plan, [0] * number, [fill._own_fillers(training)], lambda *_: None)
            for number in (1, 2)
        )
    np.testing.assert_allclose(twice, once, atol=1e-5)


def test_rows_are_filled_with_the_directions_that_they_support(filled, monkeypatch):
    """With two of the three that were learned to find how many, as where two are asked for."""
    training, _ = filled
    whole = Partition(0, (np.arange(90),))
    monkeypatch.setattr(fill, "grow_trees", lambda *_: ([whole], np.ones(6)))
    monkeypatch.setattr(evidence.Evidence, "needed_rank", lambda self: 2)
    fills = []
    for max_rank in (None, 2):
        plan = Plan.of(dataclasses.replace(DICTIONARY, max_rank=max_rank), 90, 6)
        assert plan.seeks_rank == (max_rank is None)
        with jax_settings(np.float32):
            fills.append(fill._fill(training, plan, [0], fill._fillers(training), lambda *_: None))
    np.testing.assert_allclose(*fills, atol=1e-4)


def test_rows_are_filled_in_parts(filled, monkeypatch):
    """Blocks of rows, and groups of systems of equations in each, fill as the whole does."""
    training, plan = filled
    fillers = fill._fillers(training)
    every = np.arange(90)
    trees = [Partition(1, (every, every[:45], every[45:])), Partition(1, (every, every[::2], every[1::2]))]
    monkeypatch.setattr(fill, "grow_trees", lambda *_: (trees, np.ones(6)))
    with jax_settings(np.float32):
        whole = fill._fill(training, plan, [0, 1], fillers, lambda *_: None)
        monkeypatch.setattr(fill, "_LARGE_BLOCK", 16)
        monkeypatch.setattr(fill, "_SYSTEMS", 8)
        parts = fill._fill(training, plan, [0, 1], fillers, lambda *_: None)
    np.testing.assert_allclose(parts, whole, atol=1e-5)


@pytest.fixture(scope="module")
def factor_rows():
    """200 rows of 6 features, float32: two factors and noise."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(200, 2)) @ rng.normal(size=(2, 6)) + 0.3 * rng.normal(size=(200, 6))).astype(np.float32)


@pytest.mark.parametrize(("num_folds", "depth"), [(2, 1), (3, 4)])
def test_few_folds_leave_directions_to_fill_by(factor_rows, num_folds, depth, monkeypatch):
    """With two folds no rows are left without both, and with three few, which says nothing of the fills of all rows."""
    monkeypatch.setattr(fill, "MOST_ROUNDS", 0)
    is_hidden = np.random.default_rng(2).random(factor_rows.shape) < 0.3
    plan = Plan.of(dataclasses.replace(DICTIONARY, depth=depth, min_cell_size=5), *factor_rows.shape, 190)
    start = fill_by_soft_impute(np.where(is_hidden, np.nan, factor_rows), ~is_hidden, 3, 3, 0)
    training = Training(start, 6, np.arange(200) % num_folds, ~is_hidden)
    with jax_settings(np.float32):
        found = fill.fill_conditionally(training, plan, [0], lambda *_: None)
        alone = fill._fill(training, plan, [0], [fill._own_fillers(training)], lambda *_: None)
    np.testing.assert_array_equal(found.x[training.partial], alone[0])
    assert (found.without is None) == (num_folds == 2)
    for fold in range(num_folds):
        used = is_hidden & (training.folds != fold)[:, None]
        assert np.abs(found.without_fold(fold)[:] - factor_rows)[used].mean() < 0.6 * np.abs(factor_rows[used]).mean()


@pytest.mark.parametrize("threshold", [0.0, 3.0, 1e3])
@pytest.mark.parametrize("partial", [np.arange(30), np.array([3, 17])])
def test_soft_impute_of_wide_tables(threshold, partial):
    """From their Gram matrix: the same rows as from their components."""
    x = np.random.default_rng(0).normal(size=(30, 80)) + 0.5
    found = soft_impute._rows_by_gram(x, x @ x.T, partial, threshold, 8)
    np.testing.assert_allclose(found, soft_impute._rows_by_components(x, partial, threshold, 8, 0), atol=1e-10)


def test_the_gram_matrix_follows_the_fills(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 90)) + 0.1 * rng.normal(size=(40, 90))
    is_observed = np.ones(x.shape, dtype=bool)
    is_observed[[2, 5, 30]] = rng.random((3, 90)) > 0.3
    found = fill_by_soft_impute(x, is_observed, 8, 3, 0)
    monkeypatch.setattr(soft_impute, "_rows_by_gram", lambda filled, _, *rest: _rows_by_components(filled, *rest, 0))
    np.testing.assert_allclose(found, fill_by_soft_impute(x, is_observed, 8, 3, 0), atol=1e-8)


def test_every_column_has_values_held_out():
    """Also the first one; every row keeps one that is observed."""
    is_observed = np.random.default_rng(0).random((300, 6)) < 0.3
    is_observed[~is_observed.any(axis=1), 0] = True
    kept, held_out = hold_out(is_observed, np.random.default_rng(1))
    np.testing.assert_array_equal(kept | held_out, is_observed)
    assert not (kept & held_out).any()
    assert kept.any(axis=1).all()
    assert held_out.any(axis=0).all()


def test_first_fill_is_chosen_on_some_features(monkeypatch):
    """Another choice than on all of them may result, which fills no worse."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 200)) + 0.1 * rng.normal(size=(60, 200))
    x *= np.geomspace(0.1, 10.0, 200)
    is_observed = rng.random(x.shape) > 0.2
    given = mock.Mock(wraps=choose_threshold)
    monkeypatch.setattr(first_fill, "choose_threshold", given)
    errors = []
    for enough in (200, 100):
        monkeypatch.setattr(first_fill, "ENOUGH_FEATURES", enough)
        monkeypatch.setattr(first_fill, "FEATURES_PER_ROW", 1)
        filled = fill_low_rank(np.where(is_observed, x, np.nan), is_observed, 20, 0)
        errors.append(np.abs((filled - x)[~is_observed] / x.std(axis=0).mean()).mean())
        tried, kept, held_out, _ = given.call_args.args
        assert tried.shape == (60, enough)
        np.testing.assert_array_equal(kept | held_out, tried != 0.0)
    assert errors[1] < 1.1 * errors[0]


def test_soft_impute_of_large_tables(monkeypatch):
    """Their leading components are found with random vectors; here all of the rest is small."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)) @ rng.normal(size=(3, 40)) + 0.1 * rng.normal(size=(120, 40))
    is_observed = rng.random(x.shape) > 0.3
    exact = fill_by_soft_impute(x, is_observed, 8, 3, 0)
    error, spread = (exact - x)[~is_observed], x[~is_observed].std()
    assert error.std() < 0.2 * spread
    monkeypatch.setattr(soft_impute, "EXACT_MAX_SIDE", 39)
    with mock.patch.object(soft_impute, "randomized_svd", wraps=soft_impute.randomized_svd) as by_random_vectors:
        found = fill_by_soft_impute(x, is_observed, 8, 3, 0)
    assert by_random_vectors.call_count > 8
    np.testing.assert_allclose(found, exact, atol=1e-3 * spread)
    best = [choose_threshold(x, is_observed, ~is_observed, 3)[0]]
    monkeypatch.undo()
    assert best == [choose_threshold(x, is_observed, ~is_observed, 3)[0]]


@pytest.mark.parametrize("offset", [0.0, 30.0, -300.0])
def test_the_first_fill_moves_with_the_rows(offset):
    """Those of a class may be far from 0; with many factors the pattern of what is missing must not count as one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 24)) @ rng.normal(size=(24, 24)) / 5
    is_hidden = rng.random(x.shape) < 0.3
    found = [fill_low_rank(np.where(is_hidden, np.nan, rows), ~is_hidden, 24, 0) for rows in (x, x + offset)]
    np.testing.assert_allclose(found[1], found[0] + offset, atol=1e-6)
    np.testing.assert_array_equal(found[1][~is_hidden], (x + offset)[~is_hidden])
    sizes = [fill._size(Training(rows, 24, None, ~is_hidden)) for rows in found]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_few_rows_far_from_zero_are_filled_about_their_mean(seed):
    """With nothing held out to judge fills by; what is never seen is filled about 0."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(10, 3)) + 10.0).astype(np.float32)
    is_hidden = rng.random(x.shape) < 0.2
    is_hidden[:, 0] = True
    filled = fill_low_rank(np.where(is_hidden, np.nan, x), ~is_hidden, 3, seed)
    assert np.abs(filled[:, 1:] - 10.0).max() < 5.0
    assert np.abs(filled[:, 0]).max() < 5.0


def _by_the_first(rng, x):
    """Half of the features hidden together, with a probability that rises with the first one."""
    is_hidden = np.zeros(x.shape, dtype=bool)
    is_hidden[rng.random(len(x)) < 1 / (1 + np.exp(-2 * x[:, 0] / x[:, 0].std())), 3:] = True
    return is_hidden


def _rounds(is_hidden, x, monkeypatch):
    """Sizes of the fills, as shares of that of the hidden values: the first fill, after the last round alone, and after
    rounds until they settle; and the number of these."""
    folds = np.arange(len(x)) % 3
    plan = Plan.of(DICTIONARY, *x.shape, int(is_hidden.any(axis=1).sum()))
    rounds, one_round = [], fill._fill
    monkeypatch.setattr(fill, "_fill", lambda *arguments: rounds.append(1) or one_round(*arguments))
    with jax_settings(np.float32):
        fills = [fill_by_soft_impute(np.where(is_hidden, np.nan, x), ~is_hidden, 3, 3, 0)]
        for most in (0, MOST_ROUNDS):
            monkeypatch.setattr(fill, "MOST_ROUNDS", most)
            training = Training(fills[0], x.shape[1], folds, ~is_hidden)
            fills.append(fill.fill_conditionally(training, plan, [0], lambda *_: None).x)
    for found in fills:
        np.testing.assert_array_equal(found[~is_hidden], x[~is_hidden])
    size = np.square(x[is_hidden]).mean()
    return [np.square(found[is_hidden]).mean() / size for found in fills], len(rounds) - 2


def test_fills_settle_where_few_rows_are_observed(factor_rows, monkeypatch):
    """A first fill that is shrunk to the mean: one round undoes only a part of it, and more rounds more of it."""
    is_hidden = _by_the_first(np.random.default_rng(1), factor_rows)
    (first, one, settled), num_rounds = _rounds(is_hidden, factor_rows, monkeypatch)
    assert first < one < settled - 0.1
    assert settled < 1.1
    assert num_rounds > 1


def test_fills_settle_soon_where_values_are_missing_at_random(factor_rows, monkeypatch):
    is_hidden = np.random.default_rng(1).random(factor_rows.shape) < 0.1
    (_, one, settled), num_rounds = _rounds(is_hidden, factor_rows, monkeypatch)
    assert settled == pytest.approx(one, abs=0.1)
    assert num_rounds <= MOST_ROUNDS // 2


def test_one_missing_entry_needs_one_round(factor_rows, monkeypatch):
    is_hidden = np.zeros(factor_rows.shape, dtype=bool)
    is_hidden[17, 2] = True
    assert _rounds(is_hidden, factor_rows, monkeypatch)[1] == 1


def test_fills_have_the_variance_that_is_left(factor_rows):
    """Given one feature of six, two factors vary yet: fills by means would be a function of that feature."""
    is_hidden = np.zeros(factor_rows.shape, dtype=bool)
    is_hidden[100:, 1:] = True
    plan = Plan.of(DICTIONARY, *factor_rows.shape, 100)
    with jax_settings(np.float32):
        training = Training(factor_rows.copy(), 6, np.arange(200) % 3, ~is_hidden)  # as if the fill were perfect
        found = fill.fill_conditionally(training, plan, [0], lambda *_: None)
    for x in (found.x, *map(found.without_fold, range(3))):
        filled, truth = np.cov(x[100:].T), np.cov(factor_rows[100:].T)
        assert np.trace(filled) == pytest.approx(np.trace(truth), rel=0.35)
        assert np.linalg.eigvalsh(filled)[-2] > 0.25 * np.linalg.eigvalsh(truth)[-2]  # 0.1 by means


def test_a_feature_that_is_never_seen_has_no_size(factor_rows):
    """The rows of one class may all miss it."""
    is_hidden = np.zeros(factor_rows.shape, dtype=bool)
    is_hidden[:, 2] = True
    assert fill._size(Training(factor_rows, 6, None, ~is_hidden)) == 0.0
    is_hidden[:100, 3] = True
    assert 0.0 < fill._size(Training(factor_rows, 6, None, ~is_hidden)) < 10.0


def test_a_feature_with_one_seen_value_has_no_size(factor_rows):
    """A class may show one value of a feature. Fills differ from it by rounding, and are not compared with nothing."""
    is_hidden = np.random.default_rng(1).random(factor_rows.shape) < 0.3
    rows = factor_rows.copy()
    others = [0, 1, 3, 4, 5]
    rows[:, 2] = np.where(is_hidden[:, 2], 7.0 * (1.0 + 1e-7 * np.arange(200)), 7.0)
    found = fill._size(Training(rows, 6, None, ~is_hidden))
    assert found == pytest.approx(fill._size(Training(rows[:, others], 5, None, ~is_hidden[:, others])))
    assert found < 1.0
    rows[:, 3] *= 1e-5  # in another unit
    assert found == pytest.approx(fill._size(Training(rows, 6, None, ~is_hidden)))


def test_rounds_without_folds(factor_rows):
    """All rows are then filled by the dictionary of all rows."""
    is_hidden = np.random.default_rng(1).random(factor_rows.shape) < 0.1
    plan = Plan.of(dataclasses.replace(DICTIONARY, cross_fit=None), 200, 6, int(is_hidden.any(axis=1).sum()))
    with jax_settings(np.float32):
        first = fill_low_rank(np.where(is_hidden, np.nan, factor_rows), ~is_hidden, 3, 0)
        found = fill.fill_conditionally(Training(first, 6, None, ~is_hidden), plan, [0], lambda *_: None)
    assert found.without is None
    assert np.isfinite(found.x).all()
    np.testing.assert_array_equal(found.x[~is_hidden], factor_rows[~is_hidden])


@pytest.mark.parametrize("holes", [1, 2])
def test_few_rows_with_missing_features(data, holes):
    """All of them in one fold, whose dictionary then fills none."""
    hidden = data.copy()
    hidden[:holes, 0] = np.nan
    forest = geode_jax.learn_forest(jax.random.key(0), hidden, dictionary=DICTIONARY)
    assert forest.num_rows == len(data)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((forest.dictionary, forest.partial)))


def _conditional(x, is_hidden, covariance):
    """Means and variances of the hidden entries of Gaussian rows of mean 0."""
    mean, variance = x.copy(), np.zeros(x.shape)
    for number, hidden in enumerate(is_hidden):
        across = covariance[np.ix_(hidden, ~hidden)]
        weights = np.linalg.solve(covariance[np.ix_(~hidden, ~hidden)], across.T).T
        mean[number, hidden] = weights @ x[number, ~hidden]
        variance[number, hidden] = np.diag(covariance)[hidden] - np.sum(weights * across, axis=1)
    return mean, variance


def test_factors_fill_as_the_true_distribution_does(monkeypatch):
    """Where hiding depends on a feature that is seen, maximum likelihood does not shrink to the mean; in few steps."""
    monkeypatch.setattr(factor_fill, "NUM_STEPS", 12)
    rng = np.random.default_rng(0)
    loadings = rng.normal(size=(2, 6))
    x = rng.normal(size=(1000, 2)) @ loadings + 0.3 * rng.normal(size=(1000, 6)) + 5.0
    is_hidden = _by_the_first(rng, x - 5.0)
    factors = learn_factors(x, ~is_hidden, np.where(is_hidden, 0.0, x), 2)
    truth, _ = _conditional(x - 5.0, is_hidden, loadings.T @ loadings + 0.09 * np.eye(6))
    found = means_given(factors, np.where(is_hidden, np.nan, x), ~is_hidden)
    assert np.sqrt(np.square(found - 5.0 - truth)[is_hidden].mean()) < 0.04
    np.testing.assert_allclose(factors.noise, 0.09, rtol=0.4)
    drawn = fill_by_factors(x, ~is_hidden, factors, 0)
    np.testing.assert_array_equal(drawn[~is_hidden], x[~is_hidden])
    _, variance = _conditional(x, is_hidden, factors.loadings @ factors.loadings.T + np.diag(factors.noise))
    left = (variance - factors.noise)[is_hidden].mean()  # draws of the factors have no noise
    assert np.square(drawn - found)[is_hidden].mean() == pytest.approx(left, rel=0.2)


def test_factors_of_far_rows_are_finite():
    """Their covariance is not what is left of much larger products."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 2)) @ rng.normal(size=(2, 6)) + 0.1 * rng.normal(size=(500, 6))
    is_observed = rng.random(x.shape) > 0.2
    factors = learn_factors(x, is_observed, np.where(is_observed, x, 0.0), 2)
    for far in (1e7, 1e15):
        assert np.isfinite(fill_by_factors(far * x, is_observed, factors, 0)).all()


def test_factors_of_a_feature_that_is_never_seen():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4))
    is_observed = rng.random(x.shape) < 0.8
    is_observed[:, 2] = False
    filled = fill_by_factors(x, is_observed, learn_factors(x, is_observed, np.where(is_observed, x, 0.0), 2), 0)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[:, 2], 0.0)


@pytest.mark.parametrize(("rank", "has_factors"), [(2, True), (60, False)])
def test_first_fill_is_by_factors_where_few_do(rank, has_factors, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, rank)) @ rng.normal(size=(rank, 80)) + 0.1 * rng.normal(size=(300, 80))
    is_observed = rng.random(x.shape) > 0.1
    used = []
    monkeypatch.setattr(first_fill, "fill_by_factors", lambda *arguments: used.append(1) or fill_by_factors(*arguments))
    fill_low_rank(np.where(is_observed, x, np.nan), is_observed, 80, 0)
    assert bool(used) == has_factors


def test_low_rank_fill_finds_what_low_rank_data_hide():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(200, 3)) @ rng.normal(size=(3, 40))
    x = signal + 0.1 * rng.normal(size=signal.shape)
    is_observed = rng.random(x.shape) > 0.5
    filled = fill_low_rank(np.where(is_observed, x, np.nan), is_observed, 20, 0)
    np.testing.assert_array_equal(filled[is_observed], x[is_observed])
    assert np.sqrt(np.square(filled - signal)[~is_observed].mean()) < 0.1  # the noise
    noise = rng.normal(size=(200, 40))
    filled = fill_low_rank(np.where(is_observed, noise, np.nan), is_observed, 20, 0)
    assert np.abs(filled[~is_observed]).mean() < 0.2  # nothing to find


@pytest.mark.slow
def test_chains_do_not_know_of_each_other(data):
    """The first of two chains is the only one of a fit with one, partial rows' draws included."""
    settings = dataclasses.replace(DICTIONARY, num_trees=1)
    one, two = (
        geode_jax.fit(
            jax.random.key(0),
            _hide(data, "at random"),
            dictionary=settings,
            sampler=dataclasses.replace(SAMPLER, num_chains=number),
        )
        for number in (1, 2)
    )
    np.testing.assert_allclose(two.draws.log_joint[:, :1], one.draws.log_joint, rtol=1e-4)
    assert (two.draws.count.sum(axis=-1) == len(data)).all()
    assert (np.asarray(two.draws.log_joint[:, 0]) != np.asarray(two.draws.log_joint[:, 1])).all()


@pytest.mark.slow
def test_no_scales_below_the_root_and_two_features(data):
    """One Gaussian, and the fewest features that there are: they fill in better than column means do."""
    settings = dataclasses.replace(DICTIONARY, num_trees=1, depth=0)
    hidden = _hide(data, "at random")
    posterior = geode_jax.fit(jax.random.key(0), hidden, dictionary=settings, sampler=SAMPLER)
    assert posterior.draws.count.shape[-1] == 1
    is_missing = np.isnan(hidden)
    error = np.abs(geode_jax.impute_mean(posterior, hidden) - data)[is_missing]
    assert error.mean() < np.abs(np.nanmean(hidden, axis=0) - data)[is_missing].mean()
    pair = data[:, :2].copy()
    pair[::3, 1] = np.nan
    settings = dataclasses.replace(DICTIONARY, num_trees=1, max_rank=1, depth=1)
    posterior = geode_jax.fit(jax.random.key(0), pair, dictionary=settings, sampler=SAMPLER)
    assert np.isfinite(geode_jax.log_density(posterior, pair)).all()
    np.testing.assert_array_equal(np.isnan(geode_jax.impute_mean(posterior, pair)), False)
    one = np.where(np.arange(len(data)) % 3 == 0, np.nan, data[:, 0])[:, None]
    with pytest.raises(ValueError, match="X: expected"):
        geode_jax.fit(jax.random.key(0), one)  # a row of one feature is complete or empty


@pytest.mark.slow
def test_numpyro_kernel_and_saving(data, tmp_path):
    settings = dataclasses.replace(DICTIONARY, num_trees=1)
    kernel = GeodeKernel(geode_jax.learn_forest(jax.random.key(0), _hide(data, "at random"), dictionary=settings))
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(1))
    posterior = kernel.posterior(mcmc)
    posterior.save(tmp_path / "model.npz")
    loaded = geode_jax.Posterior.load(tmp_path / "model.npz")
    assert loaded.dictionary_settings == posterior.dictionary_settings
    np.testing.assert_array_equal(geode_jax.log_density(loaded, data), geode_jax.log_density(posterior, data))


@pytest.mark.slow
def test_no_complete_row(data):
    hidden = _hide(data, "monotone")
    hidden[np.arange(6), np.arange(6)] = np.nan
    posterior = geode_jax.fit(
        jax.random.key(0), hidden, dictionary=dataclasses.replace(DICTIONARY, num_trees=1), sampler=SAMPLER
    )
    assert np.isfinite(geode_jax.log_density(posterior, data)).all()
    assert (posterior.draws.count.sum(axis=-1) == len(data)).all()

"""scikit-learn's own checks of its interface; no failure is expected. About two minutes per estimator."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import geode_jax

OPTIONS = {"num_trees": 1, "num_warmup": 5, "num_samples": 5, "depth": 1, "max_rank": 2, "random_state": 0}


@pytest.mark.slow
@parametrize_with_checks(
    [
        geode_jax.GeodeDensity(**OPTIONS),
        geode_jax.GeodeImputer(**OPTIONS),
        geode_jax.GeodeRegressor(**OPTIONS),
        geode_jax.GeodeClassifier(**OPTIONS),
    ]
)
def test_scikit_learn(estimator, check):
    check(estimator)

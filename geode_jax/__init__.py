"""Bayesian multiscale density estimation (GEODE) for high-dimensional data near low-dimensional sets."""

from geode_jax.estimators.density import GeodeDensity
from geode_jax.fit import fit
from geode_jax.posterior import Posterior
from geode_jax.predict.predictive import Imputation, impute, impute_draws, impute_mean, log_density, sample
from geode_jax.settings import (
    CrossFit,
    DictionarySettings,
    ExactShrinkage,
    FeatureNoise,
    Prior,
    PublishedShrinkage,
    RankAdaptation,
    SamplerSettings,
)

__version__ = "0.1.0"

__all__ = [
    "CrossFit",
    "DictionarySettings",
    "ExactShrinkage",
    "FeatureNoise",
    "GeodeDensity",
    "Imputation",
    "Posterior",
    "Prior",
    "PublishedShrinkage",
    "RankAdaptation",
    "SamplerSettings",
    "fit",
    "impute",
    "impute_draws",
    "impute_mean",
    "log_density",
    "sample",
]

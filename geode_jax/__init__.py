"""Bayesian multiscale density estimation (GEODE) for high-dimensional data near low-dimensional sets."""

import importlib
import warnings
from typing import Any

from geode_jax._version import __version__ as __version__
from geode_jax.estimators.classifier import GeodeClassifier
from geode_jax.estimators.density import GeodeDensity
from geode_jax.estimators.imputer import GeodeImputer
from geode_jax.estimators.regressor import GeodeRegressor
from geode_jax.fitting.classes import fit_classes
from geode_jax.fitting.single import fit, sample_posterior
from geode_jax.forest.forest import Forest
from geode_jax.forest.learn import learn_forest
from geode_jax.posterior.classes import ClassPosterior
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.api import Imputation, impute, impute_draws, impute_mean, log_density, log_density_draws, sample
from geode_jax.predict.classes import class_log_densities, class_log_probabilities
from geode_jax.predict.conditional import Conditional, condition
from geode_jax.predict.dimension import intrinsic_dimension
from geode_jax.predict.held_out import held_out_log_density
from geode_jax.settings import (
    CrossFit,
    DictionarySettings,
    DirectMembership,
    ExactShrinkage,
    FeatureNoise,
    GammaPrior,
    MissingRows,
    NoiseCovariance,
    Prior,
    PublishedShrinkage,
    RankAdaptation,
    SamplerSettings,
    SharedSpan,
    SliceMembership,
)

_RENAMED = {"NoiseShape": "NoiseCovariance"}  # old names, for a version


# Imported on first use: `diagnostics` needs NumPyro, which takes a second to import.
_LAZY = ("diagnostics", "truncation")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"geode_jax.{name} is called {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


__all__ = [
    "ClassPosterior",
    "Conditional",
    "CrossFit",
    "DictionarySettings",
    "DirectMembership",
    "ExactShrinkage",
    "FeatureNoise",
    "Forest",
    "GammaPrior",
    "GeodeClassifier",
    "GeodeDensity",
    "GeodeImputer",
    "GeodeRegressor",
    "Imputation",
    "MissingRows",
    "NoiseCovariance",
    "Posterior",
    "Prior",
    "PublishedShrinkage",
    "RankAdaptation",
    "SamplerSettings",
    "SharedSpan",
    "SliceMembership",
    "class_log_densities",
    "class_log_probabilities",
    "condition",
    "fit",
    "fit_classes",
    "held_out_log_density",
    "impute",
    "impute_draws",
    "impute_mean",
    "intrinsic_dimension",
    "learn_forest",
    "log_density",
    "log_density_draws",
    "sample",
    "sample_posterior",
]

"""What all estimators share: parameters and their conversion to settings, fitting, saving."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from geode_jax._checks import check_columns, check_dtype, check_instance, check_integer
from geode_jax._files.archive import decode, encode, read_archive, within, write_archive
from geode_jax._files.checkpoint import kept_seed
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import ArrayLike, KeyArray
from geode_jax.estimators.frames import missing_as_nan
from geode_jax.fitting.single import fit_forest
from geode_jax.fitting.stages import Request
from geode_jax.forest.forest import Forest
from geode_jax.posterior.posterior import Posterior
from geode_jax.settings import (
    CrossFit,
    DictionarySettings,
    ExactShrinkage,
    FeatureNoise,
    Prior,
    PublishedShrinkage,
    SamplerSettings,
)

Estimator = TypeVar("Estimator", bound="GeodeEstimator")
Arguments = ParamSpec("Arguments")

FLOATS = [np.float64, np.float32]
_FORMAT = "geode_jax estimator"
_FORMAT_VERSION = 2  # version 1 had all fitted attributes in its header
# What the names of arrays begin with that are fitted attributes.
_ATTRIBUTE = "attribute"
# Where scikit-learn keeps what `set_output` was called with, and what it may have been.
_OUTPUT, _OUTPUTS = "_sklearn_output_config", ("default", "pandas", "polars")


def all_or_nothing(
    fit: Callable[Concatenate[Estimator, Arguments], Estimator],
) -> Callable[Concatenate[Estimator, Arguments], Estimator]:
    """A method `fit` that leaves the estimator as it was if it ends with an error, or is interrupted.

    What an earlier fit found would otherwise stay beside a part of what this one did.
    """

    @functools.wraps(fit)
    def whole(self: Estimator, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Estimator:
        before = dict(self.__dict__)
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    return whole


@contextlib.contextmanager
def naming_too_large(name: str) -> Iterator[None]:
    """Raise TypeError that names the argument where scikit-learn meets a Python integer too large for a float."""
    try:
        yield
    except OverflowError as error:
        raise TypeError(f"{name}: expected numbers, got one that is no float: {error}") from error


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Context in which scikit-learn's errors, which speak of X, name this argument."""
    with naming_too_large(name):
        try:
            yield
        except (TypeError, ValueError) as error:
            if name == "X" or re.search(rf"\b{name}\b", str(error)):
                raise
            raise type(error)(f"{name}: " + re.sub(r"\bX\b", name, str(error))) from error


class GeodeEstimator(BaseEstimator):
    """Parameters of every estimator; :class:`geode_jax.GeodeDensity` describes them."""

    posterior_: Any

    # fitted attributes that are saved in addition to the posterior
    _saved: ClassVar[tuple[str, ...]] = ("n_features_in_", "feature_names_in_")

    # parameters that are true or false, beside those that all estimators have
    _flags: ClassVar[tuple[str, ...]] = ()

    # parameters that are not saved, since the file may be read on another machine
    _of_the_machine: ClassVar[tuple[str, ...]] = ("mesh", "checkpoint")

    def __init__(
        self,
        *,
        max_rank: int | None = None,
        depth: int | None = None,
        num_trees: int = 8,
        cross_fit: int | None = 5,
        feature_noise: bool = True,
        shrinkage: ExactShrinkage | PublishedShrinkage | None = None,
        prior: Prior | None = None,
        num_warmup: int = 100,
        num_samples: int = 100,
        num_chains: int = 1,
        dtype: Any = "float32",
        progress: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        mesh: Mesh | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.max_rank = max_rank
        self.depth = depth
        self.num_trees = num_trees
        self.cross_fit = cross_fit
        self.feature_noise = feature_noise
        self.shrinkage = shrinkage
        self.prior = prior
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.num_chains = num_chains
        self.dtype = dtype
        self.progress = progress
        self.checkpoint = checkpoint
        self.mesh = mesh
        self.random_state = random_state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one ``.npz`` file, without pickle; what `set_output` chose, too.

        Raises TypeError if `random_state` is a RandomState instance, which cannot be saved without pickle, and
        ValueError or TypeError if a parameter that was set after `fit` is wrong: the file would not load.
        """
        check_is_fitted(self)
        self._check_parameters()
        header, arrays = self._to_archive()
        parameters = {}
        for name, value in self.get_params(deep=False).items():
            if name in self._of_the_machine:
                continue
            try:
                parameters[name] = check_dtype(value).name if name == "dtype" else encode(value)
            except TypeError as error:
                raise TypeError(f"{name}: cannot be saved without pickle: {error}") from error
        attributes = {}
        for name in self._saved:
            value = getattr(self, name, None)
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                arrays = {**arrays, f"{_ATTRIBUTE}.{name}": value}  # its type is kept, and it may be large
            elif hasattr(self, name):
                attributes[name] = encode(value)
        own = {"format": _FORMAT, "version": _FORMAT_VERSION, "class": type(self).__name__}
        if output := getattr(self, _OUTPUT, None):
            if output.get("transform") not in _OUTPUTS:
                raise TypeError(f"set_output: expected one of {', '.join(_OUTPUTS)} to save, got {output!r}")
            own["output"] = output
        write_archive(path, {**own, "parameters": parameters, "attributes": attributes, "model": header}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by :meth:`save`. Raises ValueError if it holds another class, or is damaged."""
        return read_archive(path, _FORMAT, _FORMAT_VERSION, f"{cls.__name__}.save", cls._rebuild)

    @classmethod
    def _rebuild(cls, header: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Self:
        if header["class"] != cls.__name__:
            raise ValueError(f"it holds a {header['class']}")
        estimator = cls(**{name: decode(value) for name, value in header["parameters"].items()})
        estimator._check_parameters()
        of_arrays = within(arrays, _ATTRIBUTE)
        if twice := header["attributes"].keys() & of_arrays.keys():
            raise ValueError(f"attributes are in its header and among its arrays: {', '.join(twice)}")
        attributes = {**header["attributes"], **of_arrays}
        for name, value in attributes.items():
            if name not in cls._saved:
                raise ValueError(f"unknown attribute {name!r}")
            if isinstance(value, list):  # of objects, or in files of version 1 any
                of_objects = name == "feature_names_in_" or header["version"] > 1
                value = np.asarray(value, dtype=object if of_objects else None)
            setattr(estimator, name, value)
        if "output" in header:
            if header["output"].keys() != {"transform"} or header["output"]["transform"] not in _OUTPUTS:
                raise ValueError(f"unknown output {header['output']!r}")
            setattr(estimator, _OUTPUT, header["output"])
        if hasattr(estimator, "n_features_in_"):
            for name, value in estimator._added_attributes().items():
                if name not in attributes:
                    setattr(estimator, name, value)
        missing = [name for name in cls._saved if name != "feature_names_in_" and not hasattr(estimator, name)]
        if missing:
            raise ValueError(f"attributes are missing: {', '.join(missing)}")
        of_model = {name: array for name, array in arrays.items() if not name.startswith(f"{_ATTRIBUTE}.")}
        estimator._from_archive(header["model"], of_model)
        for words, is_so in estimator._expected().items():
            if not is_so:
                raise ValueError(f"attributes do not belong to the model: expected {words}")
        return estimator

    def _check_parameters(self) -> None:
        """Raise TypeError or ValueError that names the parameter that is wrong."""
        self._dictionary_settings(), self._sampler_settings()
        self._check_flags()

    def _check_flags(self) -> None:
        for name in self._flags:
            check_instance(getattr(self, name), name, bool)

    def _added_attributes(self) -> dict[str, np.ndarray]:
        """Saved attributes that files of earlier versions lack, and what they were then."""
        return {}

    def _expected(self) -> dict[str, bool]:
        """What must hold of the attributes of a loaded estimator, in words, and whether it does."""
        names = getattr(self, "feature_names_in_", None)
        return {
            "n_features_in_ as in the model": type(self.n_features_in_) is int
            and self._num_features() == self.posterior_.num_features,
            "a string for every feature in feature_names_in_": names is None
            or (names.shape == (self.n_features_in_,) and all(isinstance(name, str) for name in names)),
        }

    def _num_features(self) -> int:
        """Features of the model, of which there may be more than of X."""
        return self.n_features_in_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _fit_forest(self, data: np.ndarray) -> tuple[Forest, Posterior]:
        request = Request.checked(
            dictionary=self._dictionary_settings(),
            prior=self.prior,
            sampler=self._sampler_settings(),
            dtype=self.dtype,
            progress=self.progress,
            checkpoint=self.checkpoint,
            mesh=self.mesh,
        )
        return fit_forest(self._fit_key(), data, request)

    def _dictionary_settings(self) -> DictionarySettings:
        check_instance(self.feature_noise, "feature_noise", bool)
        if self.cross_fit is not None:
            check_integer(self.cross_fit, "cross_fit", 2)
        return DictionarySettings(
            max_rank=self.max_rank,
            depth=self.depth,
            num_trees=self.num_trees,
            cross_fit=None if self.cross_fit is None else CrossFit(self.cross_fit),
            feature_noise=FeatureNoise() if self.feature_noise else None,
        )

    def _sampler_settings(self) -> SamplerSettings:
        return SamplerSettings(
            num_warmup=self.num_warmup,
            num_samples=self.num_samples,
            num_chains=self.num_chains,
            shrinkage=ExactShrinkage() if self.shrinkage is None else self.shrinkage,
        )

    def _to_archive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return self.posterior_.to_archive()

    def _from_archive(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.posterior_ = Posterior.from_archive(header, arrays)

    def _fitted(self, X: ArrayLike, name: str = "X") -> tuple[Posterior, np.ndarray]:
        """The posterior, and the rows to predict, checked against the features seen in fit."""
        check_is_fitted(self)
        check_columns(X, name)
        X = missing_as_nan(X)
        with naming(name):
            data = validate_data(self, X, dtype=FLOATS, reset=False, ensure_all_finite="allow-nan")
        return self.posterior_, data

    def _training_rows(self, X: ArrayLike, *y: ArrayLike) -> Any:
        """The rows to fit, checked, and with labels `y` these too; the number and names of features are kept."""
        check_columns(X)
        X = missing_as_nan(X)
        with naming_too_large("X"):
            return validate_data(self, X, *y, dtype=FLOATS, ensure_min_samples=2, ensure_all_finite="allow-nan")

    def _fit_key(self) -> KeyArray:
        """Key of a fit: with a checkpoint but no seed, the one that the first such fit drew."""
        if self.random_state is not None:
            return self._key()
        return _key_of(kept_seed(self.checkpoint, lambda: _drawn_seed(None)))

    def _key(self, random_state: int | np.random.RandomState | None = None) -> KeyArray:
        given = self.random_state if random_state is None else random_state
        return _key_of(_drawn_seed(given))


def _drawn_seed(random_state: int | np.random.RandomState | None) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _key_of(seed: int) -> KeyArray:
    """A key that means the same whatever generator is the user's default."""
    with jax_settings(np.float32):
        return jax.random.key(seed, impl="threefry2x32")

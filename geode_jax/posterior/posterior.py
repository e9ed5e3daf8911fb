"""The result of a fit: dictionaries, draws, and the map between the data's units and the model's coordinates."""

import dataclasses
import os
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from geode_jax._checks import check_instance, check_integer
from geode_jax._files.archive import decode, decode_as, encode, fields_of, read_archive, within, write_archive
from geode_jax._files.schema import (
    AT_LEAST_ONE,
    DECREASING,
    LOG_PROBABILITY,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_DEFINITE,
    SHARE,
    Member,
    check_arrays,
    check_one_float_type,
    check_version,
    members_of,
    up_to,
)
from geode_jax._runtime.devices import replicated
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, Float
from geode_jax.math.rows_in_space import Space, outside_deviation
from geode_jax.model.dictionary import (
    DICTIONARY_MEMBERS,
    Dictionary,
    check_coordinates,
    dictionary_of,
    sizes_of_features,
    spread_out,
)
from geode_jax.model.draw import Adaptation, Draw
from geode_jax.model.found import Found
from geode_jax.rows.frame import Frame
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings

_FORMAT = "geode_jax posterior"
# 4: deviations of the noise in a row space; 3: features that never vary; 2: a row space; others are of version 1
_FORMAT_VERSION = 4
_PARTS = ("dictionary", "draws", "adaptation")


class Posterior(eqx.Module):
    """Draws from the posterior of a GEODE forest, with the dictionaries they refer to.

    Made by :func:`geode_jax.fit`. Arrays of `draws` have axes (trees F, chains C, draws T, ...); `dictionary` has a
    leading axis F. Everything is in model coordinates ``x = R^{-1} (y - shift) / scale``, with `shift` and `scale` of
    shape (D,) in float64 and R the symmetric `noise_root`, (V, V), of determinant 1: over their scales the features
    have noise of covariance ``sigma2 R R``. None is the identity. `features`, (V,): those that x has, which vary in the
    training rows; None is all D. Each of the others is normal by itself, with mean `shift` and deviation `scale`, which
    is small. With a `row_space`, (V, p), orthonormal columns that span all training rows, x are the p coordinates of
    ``R^{-1} (y - shift) / scale`` in it, and last the distance from it: all that densities depend on where there are
    far fewer rows than features. R is then diagonal along these columns, of `noise_deviation`, (p,), with one number
    for all that is off them; None is the identity. `dictionary_settings` are as given by the
    user; `found` is what they left open, with the reasons for each choice. `lost_mass`, (F,): mean posterior
    probability that a complete training row is at none of its candidate nodes (``DictionarySettings.num_candidates``);
    None if rows may be at any node.

    See also :func:`geode_jax.interop.arviz.to_arviz` (a conversion to ArviZ), :func:`geode_jax.diagnostics.report`
    (whether chains agree, in words), :mod:`geode_jax.interop.plots` (pictures) and
    :class:`geode_jax.interop.numpyro.PosteriorPredictive` (a distribution for NumPyro).
    """

    dictionary: Dictionary
    draws: Draw
    adaptation: Adaptation
    shift: np.ndarray
    scale: np.ndarray
    dictionary_settings: DictionarySettings = eqx.field(static=True)
    prior: Prior = eqx.field(static=True)
    sampler_settings: SamplerSettings = eqx.field(static=True)
    found: Found = eqx.field(static=True)
    noise_root: np.ndarray | None = None
    lost_mass: np.ndarray | None = None
    row_space: Float[Array, "V p"] | None = None
    features: np.ndarray | None = None
    noise_deviation: np.ndarray | None = None

    @property
    def space(self) -> Space | None:
        """The row space and the root of the noise covariance there."""
        return None if self.row_space is None else Space.of(self.row_space, self.noise_deviation)

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return np.dtype(self.dictionary.centres.dtype)

    @property
    def num_features(self) -> int:
        """D."""
        return self.shift.size

    @property
    def num_trees(self) -> int:
        """F."""
        return self.draws.log_joint.shape[0]

    @property
    def num_chains(self) -> int:
        """C, per tree."""
        return self.draws.log_joint.shape[1]

    @property
    def num_draws(self) -> int:
        """T, per chain."""
        return self.draws.log_joint.shape[2]

    @property
    def frame(self) -> Frame:
        """Coordinates of the model."""
        return Frame(self.shift, self.scale, self.noise_root, self.features)

    @property
    def of_varying(self) -> "Posterior":
        """The same posterior of the features that vary only: its D is V."""
        if self.features is None:
            return self
        return dataclasses.replace(
            self, shift=self.shift[self.features], scale=self.scale[self.features], features=None
        )

    @property
    def log_jacobian(self) -> float:
        """What to add to a log density of x to get that of the features that it has, in the data's units."""
        return -float(np.log(self.of_varying.scale).sum())

    def thin(self, num_draws: int | None) -> Draw:
        """Draws evenly spaced over each chain, with axes (F, T', ...).

        T' is `num_draws` rounded up to a multiple of the number of chains, at most all draws; None keeps all.
        """
        per_chain = self.num_draws
        if num_draws is not None:
            per_chain = min(per_chain, -(-check_integer(num_draws, "num_draws", 1) // self.num_chains))
        index = np.unique(np.linspace(0, self.num_draws - 1, per_chain).round().astype(int))
        return jax.tree.map(lambda leaf: leaf[:, :, index].reshape(leaf.shape[0], -1, *leaf.shape[3:]), self.draws)

    @property
    def unit(self) -> float:
        """The geometric mean of the scales of the features that vary."""
        return float(np.exp(np.mean(np.log(self.of_varying.scale))))

    @property
    def sigma(self) -> Float[np.ndarray, "F C T S"]:
        """Noise standard deviation by scale, in the data's units (times the feature's relative noise scale)."""
        return self.unit * np.exp(0.5 * np.asarray(self.draws.log_sigma2, dtype=np.float64))

    @property
    def scale_weights(self) -> Float[np.ndarray, "F C T S"]:
        """Total weight of the nodes at each scale."""
        weights = np.exp(np.asarray(self.draws.log_weights, dtype=np.float64))
        starts = 2 ** np.arange(self.dictionary.tree.num_scales) - 1
        return np.add.reduceat(weights, starts, axis=-1)

    @property
    def inclusion_probabilities(self) -> Float[np.ndarray, "d"]:
        """Probability that direction m is active, averaged over rows (through their nodes) and adaptation steps.

        The paper's last formula. A direction counts if it passes the removal test; one that has just returned on trial
        does not. Averaged over the adaptation steps in the second half of warm-up, or over the kept draws if there are
        none.
        """
        steps = float(np.asarray(self.adaptation.steps, np.float64).sum())
        if steps > 0:
            included = np.asarray(self.adaptation.included, np.float64).sum(axis=(0, 1, 2))
            return np.minimum(included / steps, 1.0)
        share = np.asarray(self.draws.count, np.float64)
        share = share / share.sum(axis=-1, keepdims=True)
        return np.einsum("fctk,fctkm->fctm", share, np.asarray(self.draws.is_active, np.float64)).mean(axis=(0, 1, 2))

    @property
    def intrinsic_dimension_probabilities(self) -> Float[np.ndarray, "d1"]:
        """Posterior of the intrinsic dimension p = 0..d of a row: how many directions its node needs.

        A node needs a direction if the variance of its rows along it, above the noise, is more than 5% of that along
        the widest (Fukunaga & Olsen 1971; see :func:`geode_jax.gibbs.rank.log_dimension_odds`). Averaged over rows,
        trees, chains and draws.
        """
        count = np.asarray(self.draws.count, np.float64)
        total = np.bincount(
            np.asarray(self.draws.dimension).ravel(), weights=count.ravel(), minlength=self.dictionary.max_rank + 1
        )
        return total / count.sum()

    @property
    def node_dimension_probabilities(self) -> Float[np.ndarray, "F K d1"]:
        """Posterior of the intrinsic dimension p = 0..d of every node of every tree; NaN at absent nodes.

        Averaged over chains and draws, weighted by the number of rows at the node. A node that never held a row has
        the prior probabilities.
        """
        count = np.asarray(self.draws.count, np.float64)
        held = count.sum(axis=(1, 2), keepdims=True)
        weight = np.where(held > 0, count, 1.0)
        dimension = np.asarray(self.draws.dimension)
        probabilities = np.stack(
            [(weight * (dimension == p)).sum(axis=(1, 2)) for p in range(self.dictionary.max_rank + 1)], axis=-1
        )
        probabilities /= weight.sum(axis=(1, 2))[..., None]
        return np.where(np.asarray(self.dictionary.tree.is_present)[..., None], probabilities, np.nan)

    @property
    def intrinsic_dimension(self) -> int | None:
        """Posterior mode of the intrinsic dimension; None if it is the most directions that were allowed.

        There may be more then. A mode at `Posterior.found.rank`, if that is less, means that held-out rows told of no
        further directions. `Posterior.found.rank_limit` is how many were allowed: `max_rank`, or its default; never
        more than V - 1, as the noise must show too. Files of earlier versions do not say: their mode is returned.
        """
        mode = int(np.argmax(self.intrinsic_dimension_probabilities))
        return None if mode == self.found.rank == self.found.rank_limit else mode

    def spread_out(self) -> "Posterior":
        """The same posterior without a `row_space`: its dictionary has V coordinates, and may take much memory.

        So may the root of a noise covariance, (V, V).
        """
        if self.row_space is None:
            return self
        with jax_settings(self.dtype):
            dictionary = spread_out(self.dictionary, self.row_space)
        root = self.noise_deviation
        if root is not None:
            axes = np.asarray(self.row_space, np.float64)
            outside = outside_deviation(root, len(axes))
            root = (axes * (root - outside)) @ axes.T
            root[np.diag_indices_from(root)] += outside
        return dataclasses.replace(self, dictionary=dictionary, row_space=None, noise_deviation=None, noise_root=root)

    def replicated(self, mesh: Mesh | None) -> "Posterior":
        """The same posterior on every device of a mesh, which then share the rows of predictions.

        The rows of one call to :func:`geode_jax.log_density`, :func:`geode_jax.impute`, :func:`geode_jax.sample` and
        the like are spread over these devices; results are those of one device, up to the order of sums. Every device
        holds the whole dictionary. Where the mesh has devices of several processes, each process uses its own of them,
        for the rows that it passes itself. None: JAX's default device alone. :func:`geode_jax.fit` with a mesh returns
        a posterior that is replicated on it; a loaded one is on the default device.
        """
        check_instance(mesh, "mesh", (Mesh, None))
        with jax_settings(self.dtype):
            parts = replicated((self.dictionary, self.row_space), mesh)
            return dataclasses.replace(self, dictionary=parts[0], row_space=parts[1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one ``.npz`` file, without pickle; an interrupted write leaves no partial file."""
        write_archive(path, *self.to_archive())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Posterior":
        """Read a file written by :meth:`save`. Raises ValueError if it is another kind of file, or is damaged."""
        return read_archive(path, _FORMAT, _FORMAT_VERSION, "Posterior.save", Posterior.from_archive)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is saved: JAX's own pickles of float64 come back as float32 where 64-bit types are off."""
        return Posterior.from_archive, self.to_archive()

    def to_archive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a file, for files that hold more than a posterior."""
        arrays = {f"{part}.{name}": array for part in _PARTS for name, array in fields_of(getattr(self, part)).items()}
        arrays |= {
            "tree.is_present": np.asarray(self.dictionary.tree.is_present),
            "shift": self.shift,
            "scale": self.scale,
        }
        names = "noise_root", "lost_mass", "row_space", "features", "noise_deviation"
        optional = {name: getattr(self, name) for name in names}
        arrays |= {name: np.asarray(array) for name, array in optional.items() if array is not None}
        header = {
            "format": _FORMAT,
            "version": self._version,
            "dictionary_settings": encode(self.dictionary_settings),
            "found": self.found.to_header(),
            "prior": encode(self.prior),
            "sampler_settings": encode(self.sampler_settings),
            "arrays": sorted(arrays),
        }
        return header, arrays

    @property
    def _version(self) -> int:
        """The first format that has all that this posterior has."""
        if self.noise_deviation is not None:
            return 4
        return 3 if self.features is not None else 1 if self.row_space is None else 2

    @staticmethod
    def from_archive(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> "Posterior":
        """The inverse of :meth:`to_archive`."""
        return _rebuild(header, arrays)


_DRAW_RULES = {
    "neg_log_u": NOT_NEGATIVE,
    "tau": AT_LEAST_ONE,
    "log_weights": LOG_PROBABILITY,
    "count": NOT_NEGATIVE,
    "dimension": up_to("d"),
}
_IN_MODEL_TYPE = {
    **DICTIONARY_MEMBERS,
    **members_of(Draw, "draws", "F C T", _DRAW_RULES),
    **members_of(Adaptation, "adaptation", "F C", {"included": NOT_NEGATIVE, "steps": NOT_NEGATIVE}),
}
_MEMBERS = {
    **_IN_MODEL_TYPE,
    "shift": Member("f", ("D",)),
    "scale": Member("f", ("D",), POSITIVE),
    "noise_root": Member("f", ("V", "V"), POSITIVE_DEFINITE, is_optional=True),
    "noise_deviation": Member("f", ("p",), DECREASING, is_optional=True),
    "lost_mass": Member("f", ("F",), SHARE, is_optional=True),
}


def _check(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless header and arrays are those of a posterior."""
    check_version(header, _FORMAT, _FORMAT_VERSION)
    # the first files do not list their arrays
    if sorted(header.get("arrays", arrays)) != sorted(arrays):
        raise ValueError("the arrays are not those that the header lists")
    num_nodes = arrays["tree.is_present"].shape[-1] if arrays["tree.is_present"].ndim == 2 else 0
    sizes = {"S": (num_nodes + 1).bit_length() - 1, **sizes_of_features(arrays)}
    check_arrays(arrays, _MEMBERS, sizes)
    check_coordinates(arrays, sizes)
    check_one_float_type(arrays, _IN_MODEL_TYPE, arrays["dictionary.centres"].dtype)
    if not all(arrays[name].shape[axis] for name in ("draws.tau", "draws.count") for axis in range(4)):
        raise ValueError("it holds no draws")


def _rebuild(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Posterior:
    _check(header, arrays)

    def part(name: str) -> dict[str, Array]:
        return jax.device_put(within(arrays, name))

    with jax_settings(arrays["dictionary.centres"].dtype):
        return Posterior(
            dictionary=dictionary_of(arrays),
            draws=jax.tree.map(np.asarray, Draw(**part("draws"))),
            adaptation=jax.tree.map(np.asarray, Adaptation(**part("adaptation"))),
            shift=arrays["shift"],
            scale=arrays["scale"],
            dictionary_settings=decode_as(DictionarySettings, header["dictionary_settings"]),
            found=_found(header, arrays),
            prior=decode_as(Prior, header["prior"]),
            sampler_settings=decode_as(SamplerSettings, header["sampler_settings"]),
            noise_root=arrays.get("noise_root"),
            lost_mass=arrays.get("lost_mass"),
            row_space=jax.device_put(arrays.get("row_space")),
            features=arrays.get("features"),
            noise_deviation=arrays.get("noise_deviation"),
        )


def _found(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Found:
    """What stage one found; files of the first format hold it in the settings."""
    rank = arrays["dictionary.bases"].shape[-1]
    if "found" in header:
        found = Found.from_header(header["found"])
        if found.rank != rank:
            raise ValueError(f"the header names rank {found.rank}, the arrays have {rank}")
        return found
    settings = decode(header["dictionary_settings"])
    span, num_nodes = settings.shared_span, arrays["tree.is_present"].shape[-1]
    return Found(rank, None if span is None else span.rank, settings.num_candidates or num_nodes)

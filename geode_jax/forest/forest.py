"""The result of stage one: dictionaries, and the statistics of the training rows."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from geode_jax._files.archive import decode_as, encode, fields_of, within
from geode_jax._files.schema import (
    DECREASING,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_DEFINITE,
    Member,
    check_arrays,
    members_of,
    up_to,
)
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax._typing import Array, Float
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.candidate_statistics import AnyStatistics, CandidateStatistics, Probe
from geode_jax.model.dictionary import (
    DICTIONARY_MEMBERS,
    Dictionary,
    check_coordinates,
    dictionary_of,
    sizes_of_features,
)
from geode_jax.model.found import Found
from geode_jax.model.on_host import on_host
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.problem import Problem
from geode_jax.model.statistics import Statistics
from geode_jax.settings import DictionarySettings, Prior, SamplerSettings

_PARTS = ("dictionary", "statistics", "partial", "borrowed", "probe")


class Forest(eqx.Module):
    """What stage one learned: the dictionaries of all trees, and all that the sampler needs of the training rows.

    `statistics` are those of the complete rows, `partial` those of the rows with missing features, None without such.
    `borrowed`: what the prior takes from stage one. `probe`: a few complete rows at all nodes, where `statistics` are
    those of candidate nodes only.

    Made by :func:`geode_jax.learn_forest`; arrays of `dictionary` and `statistics` have a leading axis F. Everything is
    in model coordinates ``x = R^{-1} (y - shift) / scale``, with `shift` and `scale` of shape (D,) in float64 and R the
    `noise_root`, (V, V); None is the identity. `features`, (V,): those that vary, which x has; None is all D. With a
    `row_space` they are coordinates in that, and the distance from it; R is then given by the `noise_deviation` (see
    :class:`geode_jax.Posterior`).
    `dictionary_settings` are those the user gave; `found` is what was chosen where they left it open, and why.
    """

    dictionary: Dictionary
    statistics: AnyStatistics
    partial: PartialRows | None
    borrowed: Borrowed
    probe: Probe | None
    shift: np.ndarray
    scale: np.ndarray
    dictionary_settings: DictionarySettings = eqx.field(static=True)
    found: Found = eqx.field(static=True)
    noise_root: np.ndarray | None = None
    row_space: Float[Array, "V p"] | None = None
    features: np.ndarray | None = None
    noise_deviation: np.ndarray | None = None

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return np.dtype(self.dictionary.centres.dtype)

    @property
    def num_trees(self) -> int:
        """F."""
        return self.dictionary.centres.shape[0]

    @property
    def num_rows(self) -> int:
        """Training rows."""
        complete = int(self.statistics.num_rows[0])
        if self.partial is None:
            return complete
        return complete + int((self.partial.node[0, ..., 0] < self.dictionary.tree.num_nodes).sum())

    def problem(self, prior: Prior, sampler: SamplerSettings) -> Problem:
        """The sampler's input for all trees, with a leading axis F on its arrays."""
        dictionary = self.dictionary
        return Problem(
            tree=dictionary.tree,
            statistics=self.statistics,
            partial=self.partial,
            borrowed=self.borrowed,
            is_available=_available(dictionary),
            prior=prior,
            shrinkage=sampler.shrinkage,
            membership=sampler.membership,
            num_features=np.full(self.num_trees, dictionary.num_features, self.dtype),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is saved: JAX's own pickles of float64 come back as float32 where 64-bit types are off."""
        return Forest.from_archive, self.to_archive()

    def to_archive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a file."""
        arrays = {
            "shift": self.shift,
            "scale": self.scale,
            "tree.is_present": np.asarray(self.dictionary.tree.is_present),
        }
        names = "noise_root", "row_space", "features", "noise_deviation"
        optional = {name: getattr(self, name) for name in names}
        arrays |= {name: np.asarray(array) for name, array in optional.items() if array is not None}
        for part in _PARTS:
            arrays |= {f"{part}.{name}": array for name, array in fields_of(getattr(self, part)).items()}
        header = {"dictionary_settings": encode(self.dictionary_settings), "found": self.found.to_header()}
        return header, arrays

    @staticmethod
    def from_archive(header: dict[str, Any], arrays: dict[str, np.ndarray], *, on_device: bool = True) -> "Forest":
        """The inverse of :meth:`to_archive`. Raises ValueError if they are not those of a forest.

        The rows' statistics go to the device, or, without `on_device`, stay on the host.
        """
        _check(arrays)
        with jax_settings(arrays["dictionary.centres"].dtype):
            borrowed = jax.device_put(within(arrays, "borrowed"))
            of_rows = [within(arrays, part) for part in ("statistics", "partial", "probe")]
            statistics, partial, probe = jax.device_put(of_rows) if on_device else of_rows
            kind: type[AnyStatistics] = CandidateStatistics if "position" in statistics else Statistics
            return Forest(
                dictionary=dictionary_of(arrays),
                statistics=on_host(kind, **statistics),
                partial=on_host(PartialRows, **{"entry": None, "root": None, **partial}) if partial else None,
                borrowed=Borrowed(**borrowed),
                probe=on_host(Probe, **probe) if probe else None,
                shift=arrays["shift"],
                scale=arrays["scale"],
                dictionary_settings=decode_as(DictionarySettings, header["dictionary_settings"]),
                found=Found.from_header(header["found"]),
                noise_root=arrays.get("noise_root"),
                row_space=jax.device_put(arrays.get("row_space")),
                features=arrays.get("features"),
                noise_deviation=arrays.get("noise_deviation"),
            )


@jax.jit
def _available(dictionary: Dictionary) -> Array:
    """Directions that the data support, none at absent nodes."""
    return dictionary.is_available & dictionary.tree.is_present[..., None]


_DICTIONARY = {
    **DICTIONARY_MEMBERS,
    "shift": Member("f", ("D",)),
    "scale": Member("f", ("D",), POSITIVE),
    "noise_root": Member("f", ("V", "V"), POSITIVE_DEFINITE, is_optional=True),
    "noise_deviation": Member("f", ("p",), DECREASING, is_optional=True),
}
# the node of a place without a row is K; the axes n, P and B of different modules are not the same
_NODES = {"node": up_to("K"), "entry_node": up_to("K"), "block_node": up_to("K")}
_STATISTICS = members_of(Statistics, "statistics", "F", {"num_rows": up_to("n")})
_CANDIDATES = members_of(
    CandidateStatistics, "statistics", "F", {**_NODES, "position": up_to("P"), "num_rows": up_to("n")}
)
_PARTIAL = members_of(PartialRows, "partial", "F", {**_NODES, "entry": up_to("P")})
_BORROWED = members_of(Borrowed, "borrowed", "F", {"count": NOT_NEGATIVE, "squared": NOT_NEGATIVE, "noise": POSITIVE})
_PROBE = members_of(Probe, "probe", "F")


def _check(arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless the arrays are those of a forest."""
    statistics = _CANDIDATES if "statistics.position" in arrays else _STATISTICS
    parts = [_DICTIONARY, statistics, _BORROWED]
    parts += [part for part in (_PARTIAL, _PROBE) if part.keys() & arrays.keys()]
    known = {name for part in parts for name in part}
    if arrays.keys() - known:
        raise ValueError(f"arrays are unknown: {', '.join(sorted(map(repr, arrays.keys() - known)))}")
    sizes = sizes_of_features(arrays)
    for part in parts:
        own = {name: array for name, array in arrays.items() if name in part}
        shared = {axis: length for axis, length in sizes.items() if axis in ("F", "K", "D", "V", "d")}
        check_arrays(own, part, shared)
        sizes |= shared
        if part is _DICTIONARY:
            check_coordinates(own, shared)

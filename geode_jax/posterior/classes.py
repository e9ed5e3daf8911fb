"""The result of a fit of several classes: one posterior per class, in coordinates common to all."""

import dataclasses
import os
from typing import Any

import equinox as eqx
import numpy as np
from jax.sharding import Mesh

from geode_jax._files.archive import read_archive, within, write_archive
from geode_jax._files.schema import LOG_PROBABILITY, POSITIVE, Member, check_arrays, check_version
from geode_jax.learning.class_span import Reduction
from geode_jax.model.dictionary import sizes_of_features
from geode_jax.posterior.posterior import Posterior
from geode_jax.rows.frame import Frame

_FORMAT = "geode_jax classes"
_FORMAT_VERSION = 2  # that of files with features that never vary; others are of version 1
_MEMBERS = {
    "shift": Member("f", ("D",)),
    "scale": Member("f", ("D",), POSITIVE),
    "log_prior": Member("f", ("G",), LOG_PROBABILITY),
    "features": Member("i", ("V",), is_optional=True),
    "reduction.origin": Member("f", ("V",), is_optional=True),
    "reduction.basis": Member("f", ("V", "r"), is_optional=True),
    "reduction.noise": Member("f", (), POSITIVE, is_optional=True),
}


class ClassPosterior(eqx.Module):
    """Draws from the posterior of one GEODE forest per class.

    Made by :func:`geode_jax.fit_classes`. Rows are ``x = (y - shift) / scale``, with `shift` and `scale` of shape (D,)
    common to all. `members` (G) are the densities of the classes: of x, or, with a `reduction`, of its r coordinates.
    Outside these all classes have the same noise. `log_prior` (G,): log class probabilities. For calibrated
    probabilities the class log densities of complete rows are multiplied by `power`, and those of rows with a share f
    of their features observed by ``min(1, power f^power_exponent)``. `features`, (V,): those that x has, which vary in
    the training rows; None is all. What never varies says nothing of a class: the others are ignored.
    """

    members: tuple[Posterior, ...]
    reduction: Reduction | None
    shift: np.ndarray
    scale: np.ndarray
    log_prior: np.ndarray
    power: float = eqx.field(static=True)
    power_exponent: float = eqx.field(static=True)
    features: np.ndarray | None = None

    @property
    def num_classes(self) -> int:
        """G."""
        return len(self.members)

    @property
    def num_features(self) -> int:
        """D."""
        return self.shift.size

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return self.members[0].dtype

    @property
    def frame(self) -> Frame:
        """Coordinates in which all classes were learned; a `reduction` comes after them."""
        return Frame(self.shift, self.scale, features=self.features)

    @property
    def varying_features(self) -> np.ndarray | slice:
        """The index of the features that count."""
        return slice(None) if self.features is None else self.features

    def log_density_outside(self, x: np.ndarray) -> np.ndarray:
        """What to add to a member's log density of complete rows ``x`` to get it in the data's units, (n,)."""
        jacobian = np.full(x.shape[0], -np.log(self.scale[self.varying_features]).sum())
        return jacobian if self.reduction is None else jacobian + self.reduction.log_density_outside(x)

    def power_at(self, share: np.ndarray) -> np.ndarray:
        """Factor for the log densities of rows with this share of their features observed."""
        # a row without observed features has the same density under every class, whatever the factor
        return np.minimum(1.0, self.power * np.maximum(share, 1e-6) ** self.power_exponent)

    def replicated(self, mesh: Mesh | None) -> "ClassPosterior":
        """The same posterior on every device of a mesh; see :meth:`geode_jax.Posterior.replicated`."""
        return dataclasses.replace(self, members=tuple(member.replicated(mesh) for member in self.members))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one ``.npz`` file, without pickle; an interrupted write leaves no partial file."""
        write_archive(path, *self.to_archive())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ClassPosterior":
        """Read a file written by :meth:`save`. Raises ValueError if it is another kind of file, or is damaged."""
        return read_archive(path, _FORMAT, _FORMAT_VERSION, "ClassPosterior.save", ClassPosterior.from_archive)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is saved: JAX's own pickles of float64 come back as float32 where 64-bit types are off."""
        return ClassPosterior.from_archive, self.to_archive()

    def to_archive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a file, for files that hold more than a posterior."""
        arrays = {"shift": self.shift, "scale": self.scale, "log_prior": self.log_prior}
        if self.features is not None:
            arrays["features"] = self.features
        if self.reduction is not None:
            arrays |= {f"reduction.{name}": np.asarray(part) for name, part in self.reduction._asdict().items()}
        headers = []
        for number, member in enumerate(self.members):
            header, parts = member.to_archive()
            headers.append(header)
            arrays |= {f"{number}.{name}": part for name, part in parts.items()}
        own = {"power": self.power, "power_exponent": self.power_exponent, "members": headers}
        return {"format": _FORMAT, "version": 1 if self.features is None else _FORMAT_VERSION, **own}, arrays

    @staticmethod
    def from_archive(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> "ClassPosterior":
        """The inverse of :meth:`to_archive`."""
        check_version(header, _FORMAT, _FORMAT_VERSION)
        of_member = [within(arrays, str(number)) for number in range(len(header["members"]))]
        members = tuple(
            Posterior.from_archive(own, parts) for own, parts in zip(header["members"], of_member, strict=True)
        )
        numbers = tuple(f"{number}." for number in range(len(members)))
        own_arrays = {name: array for name, array in arrays.items() if not name.startswith(numbers)}
        sizes = {"G": len(members), **sizes_of_features(own_arrays)}
        check_arrays(own_arrays, _MEMBERS, sizes)
        parts = within(arrays, "reduction")
        if parts and len(parts) < len(Reduction._fields):
            raise ValueError("a part of the reduction is missing")
        reduction = Reduction(**parts) if parts else None
        # the first files had no power_exponent: one power for all rows
        powers = float(header["power"]), float(header.get("power_exponent", 0.0))
        own = arrays["shift"], arrays["scale"], arrays["log_prior"]
        found = ClassPosterior(members, reduction, *own, *powers, own_arrays.get("features"))
        own_features = {member.num_features for member in members}
        expected = sizes["V"] if reduction is None else reduction.basis.shape[1]
        if own_features != {expected}:
            raise ValueError(f"classes have {sorted(own_features)} features, expected {expected}")
        if len({(member.num_trees, member.dtype) for member in members}) > 1:
            raise ValueError("classes differ in their number of trees or their dtype")
        if not all(np.isfinite(power) for power in powers) or powers[0] <= 0.0:
            raise ValueError(f"powers are {powers}, expected finite numbers, the first above 0")
        return found

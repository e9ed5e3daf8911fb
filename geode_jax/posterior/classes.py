"""The result of a fit of several classes: one posterior per class, in coordinates common to all."""

import os
from typing import Any

import equinox as eqx
import numpy as np

from geode_jax._files.archive import read_archive, within, write_archive
from geode_jax.learning.class_span import Reduction
from geode_jax.posterior.posterior import Posterior
from geode_jax.rows.frame import Frame

_FORMAT = "geode_jax classes"
_FORMAT_VERSION = 1


class ClassPosterior(eqx.Module):
    """Draws from the posterior of one GEODE forest per class.

    Made by :func:`geode_jax.fit_classes`. Rows are ``x = (y - shift) / scale``, with `shift` and `scale` of shape (D,)
    common to all. `members` (G) are the densities of the classes: of x, or, with a `reduction`, of its r coordinates.
    Outside these all classes have the same noise. `log_prior` (G,): log class probabilities. For calibrated
    probabilities the class log densities of complete rows are multiplied by `power`, and those of rows with a share f
    of their features observed by ``min(1, power f^power_exponent)``.
    """

    members: tuple[Posterior, ...]
    reduction: Reduction | None
    shift: np.ndarray
    scale: np.ndarray
    log_prior: np.ndarray
    power: float = eqx.field(static=True)
    power_exponent: float = eqx.field(static=True)

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
        return Frame(self.shift, self.scale)

    def log_density_outside(self, x: np.ndarray) -> np.ndarray:
        """What to add to a member's log density of complete rows ``x`` to get it in the data's units, (n,)."""
        jacobian = np.full(x.shape[0], -np.log(self.scale).sum())
        return jacobian if self.reduction is None else jacobian + self.reduction.log_density_outside(x)

    def power_at(self, share: np.ndarray) -> np.ndarray:
        """Factor for the log densities of rows with this share of their features observed."""
        return np.minimum(1.0, self.power * share**self.power_exponent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one ``.npz`` file, without pickle; an interrupted write leaves no partial file."""
        write_archive(path, *self.to_archive())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ClassPosterior":
        """Read a file written by :meth:`save`. Raises ValueError if it is another kind of file, or is damaged."""
        return read_archive(path, _FORMAT, _FORMAT_VERSION, "ClassPosterior.save", ClassPosterior.from_archive)

    def to_archive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Header and arrays of a file, for files that hold more than a posterior."""
        arrays = {"shift": self.shift, "scale": self.scale, "log_prior": self.log_prior}
        if self.reduction is not None:
            arrays |= {f"reduction.{name}": np.asarray(part) for name, part in self.reduction._asdict().items()}
        headers = []
        for number, member in enumerate(self.members):
            header, parts = member.to_archive()
            headers.append(header)
            arrays |= {f"{number}.{name}": part for name, part in parts.items()}
        own = {"power": self.power, "power_exponent": self.power_exponent, "members": headers}
        return {"format": _FORMAT, "version": _FORMAT_VERSION, **own}, arrays

    @staticmethod
    def from_archive(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> "ClassPosterior":
        """The inverse of :meth:`to_archive`."""
        members = tuple(
            Posterior.from_archive(own, within(arrays, str(number))) for number, own in enumerate(header["members"])
        )
        parts = within(arrays, "reduction")
        reduction = Reduction(**parts) if parts else None
        # the first files had no power_exponent: one power for all rows
        powers = float(header["power"]), float(header.get("power_exponent", 0.0))
        found = ClassPosterior(members, reduction, arrays["shift"], arrays["scale"], arrays["log_prior"], *powers)
        own_features = {member.num_features for member in members}
        expected = found.num_features if reduction is None else reduction.basis.shape[1]
        has_shapes = found.scale.shape == found.shift.shape and found.log_prior.shape == (len(members),)
        if reduction is not None:
            has_shapes &= reduction.origin.shape == found.shift.shape == reduction.basis.shape[:1]
        if own_features != {expected} or not has_shapes:
            raise ValueError("arrays have shapes that do not belong together")
        return found

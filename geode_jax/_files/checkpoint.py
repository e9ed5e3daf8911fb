"""A folder in which a fit saves its progress, so that a killed fit can be resumed.

Every file appears whole or not at all, and identifies its fit by a digest of the fit's arguments.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from geode_jax._files.archive import encode, read_archive, write_archive
from geode_jax._typing import KeyArray

_FORMAT = "geode_jax checkpoint"
_FORMAT_VERSION = 1

Found: TypeAlias = tuple[dict[str, Any], dict[str, np.ndarray]]


class Checkpoint:
    """Files of one fit; `part` gives each part of a fit a subfolder."""

    def __init__(self, folder: str | os.PathLike[str], digest: str) -> None:
        self.folder = Path(folder)
        self.digest = digest

    def part(self, name: str) -> "Checkpoint":
        """The checkpoint of a part of the fit, in a subfolder."""
        return Checkpoint(self.folder / name, self.digest)

    def write(self, name: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Save a header and arrays under a name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {"format": _FORMAT, "version": _FORMAT_VERSION, "digest": self.digest, "content": header}
        write_archive(self._path(name), own, arrays)

    def read(self, name: str) -> Found | None:
        """The header and arrays saved under a name; None if there are none.

        Raises ValueError if the file belongs to another fit, or is damaged.
        """
        path = self._path(name)
        if not path.exists():
            return None
        return read_archive(path, _FORMAT, _FORMAT_VERSION, "a fit with the argument checkpoint", self._open)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def _open(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Found:
        if header["digest"] != self.digest:
            raise ValueError("it belongs to a fit with another key, other data or other settings")
        return header["content"], arrays


def open_checkpoint(
    folder: str | os.PathLike[str] | None, key: KeyArray, arrays: list[np.ndarray], settings: list[Any]
) -> Checkpoint | None:
    """The checkpoint of a fit with these arguments; None without a folder."""
    if folder is None:
        return None
    try:
        path = Path(folder)
    except TypeError:
        raise TypeError(f"checkpoint: expected a path of a folder, got {folder!r}") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"checkpoint: expected a folder, got the file {path}")
    digest = hashlib.sha256(json.dumps([encode(item) for item in settings]).encode())
    for array in [np.asarray(jax.random.key_data(key)), *arrays]:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return Checkpoint(path, digest.hexdigest())

"""A folder in which a fit saves its progress, so that a killed fit can be resumed.

Every file appears whole or not at all, and says which fit it belongs to: by a digest of the fit's arguments, and by
what else the draws depend on. One fit at a time uses a folder.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh

from geode_jax._files.archive import encode, read_archive, write_archive
from geode_jax._files.whole import written_whole
from geode_jax._typing import KeyArray
from geode_jax._version import __version__
from geode_jax.rows.processes import Processes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FORMAT = "geode_jax checkpoint"
_FORMAT_VERSION = 7
# Bytes of the data that are read at once to tell whether a checkpoint belongs to them.
DIGEST_BYTES = 2**24

Found: TypeAlias = tuple[dict[str, Any], dict[str, np.ndarray]]


class Checkpoint:
    """Files of one fit; `part` gives each part of a fit a subfolder."""

    def __init__(self, folder: str | os.PathLike[str], digest: str, mesh: Mesh | None = None) -> None:
        self.folder = Path(folder)
        self.digest = digest
        self.mesh = mesh
        # what draws depend on, bit for bit, beside the arguments
        self.made_by = {
            "geode_jax": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": jax.default_backend(),
            # programs compiled otherwise round otherwise
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "jax_disable_most_optimizations": bool(jax.config.read("jax_disable_most_optimizations")),
            "mesh": _in_words(mesh),  # devices add up rows of their own first
        }

    def part(self, name: str) -> "Checkpoint":
        """The checkpoint of a part of the fit, in a subfolder."""
        return Checkpoint(self.folder / name, self.digest, self.mesh)

    def of_process(self, processes: Processes, numbers: list[int]) -> "Checkpoint":
        """The checkpoint of this process, in a subfolder, where each brings its own rows.

        Its files belong to the rows of all processes, and to these `numbers`, alike in all.
        """
        own = np.frombuffer(bytes.fromhex(self.digest), np.uint32).astype(np.int64)
        everyones = hashlib.sha256(np.array([*processes.each(own).ravel(), *numbers], np.int64).data)
        return Checkpoint(self.folder / f"process {processes.index}", everyones.hexdigest(), self.mesh)

    def forget(self, name: str) -> None:
        """Remove what was saved under a name, if there is anything."""
        self._path(name).unlink(missing_ok=True)

    def write(self, name: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Save a header and arrays under a name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {"format": _FORMAT, "version": _FORMAT_VERSION, "digest": self.digest, "made_by": self.made_by}
        write_archive(self._path(name), {**own, "name": name, "content": header}, arrays)

    def read(self, name: str) -> Found | None:
        """The header and arrays saved under a name; None if there are none.

        Raises ValueError if the file belongs to another fit, was made under other conditions, or is damaged.
        """
        path = self._path(name)
        if not path.exists():
            return None

        def opened(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Found:
            self._check(header, name)
            return header["content"], arrays

        return read_archive(path, _FORMAT, _FORMAT_VERSION, "a fit", opened, "checkpoint")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def _check(self, header: dict[str, Any], name: str) -> None:
        if header["version"] < _FORMAT_VERSION:
            raise ValueError("it was written by an earlier geode_jax, which draws otherwise; use a new folder")
        if header["digest"] != self.digest:
            raise ValueError("it belongs to a fit with another key, other data or other settings; use a new folder")
        if header["name"] != name:
            raise ValueError(f"it holds {header['name']!r}: files were moved or swapped")
        for what, now in self.made_by.items():
            if header["made_by"].get(what) != now:
                raise ValueError(
                    f"it was made with {what} {header['made_by'].get(what)}, and this is {what} {now}, so that the fit"
                    " could not go on to the same draws; go on with what it was made with, or use a new folder"
                )


def _in_words(mesh: Mesh | None) -> str:
    """Sizes of the mesh, the kind of its devices, and the number of their processes if they have several."""
    if mesh is None:
        return "none"
    sizes = " x ".join(f"{size} {axis}" for axis, size in sorted(mesh.shape.items()) if size > 1) or "one device"
    num_processes = len({device.process_index for device in mesh.devices.flat})
    return f"{sizes} ({mesh.devices.flat[0].platform}{f', {num_processes} processes' if num_processes > 1 else ''})"


@contextlib.contextmanager
def open_checkpoint(
    folder: str | os.PathLike[str] | None,
    key: KeyArray,
    arrays: list[np.ndarray],
    settings: list[Any],
    mesh: Mesh | None = None,
) -> Iterator[Checkpoint | None]:
    """The checkpoint of a fit with these arguments, on this mesh; None without a folder.

    No other fit can use it meanwhile.
    """
    if folder is None:
        yield None
        return
    path = _checked(folder)
    digest = hashlib.sha256(json.dumps([encode(item) for item in settings]).encode())
    if (kind := str(jax.random.key_impl(key))) != "threefry2x32":  # whose digests say nothing of it, in older files too
        digest.update(kind.encode())
    for array in [np.asarray(jax.random.key_data(key)), *arrays]:
        digest.update(f"{array.dtype} {array.shape}".encode())
        for part in _parts(array):
            digest.update(np.ascontiguousarray(part).data)
    with _locked(path):
        yield Checkpoint(path, digest.hexdigest(), mesh)


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in parts of few bytes: it may be a file that is larger than memory."""
    if array.ndim == 0 or array.size == 0:
        yield array
        return
    step = max(1, DIGEST_BYTES // (array.nbytes // len(array)))
    for start in range(0, len(array), step):
        yield array[start : start + step]


def kept_seed(folder: str | os.PathLike[str] | None, draw: Callable[[], int]) -> int:
    """The seed kept in the folder of a checkpoint, so that a fit without a given seed can be resumed.

    The first call draws one and keeps it; without a folder, every call draws one.
    """
    if folder is None:
        return draw()
    place = _checked(folder) / "seed.json"
    with _locked(place.parent):
        try:
            return int(json.loads(place.read_text())["seed"])
        except FileNotFoundError:
            seed = draw()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"checkpoint: expected a seed in {place}, got {error}") from error
        place.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(place) as partial:
            partial.write_text(json.dumps({"seed": seed}))
    return seed


def _checked(folder: str | os.PathLike[str]) -> Path:
    try:
        path = Path(folder)
    except TypeError:
        raise TypeError(f"checkpoint: expected a path of a folder, got {folder!r}") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"checkpoint: expected a folder, got the file {path}")
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one fit. The system drops the lock of a process that dies.

    The processes of one distributed run share a folder: the first of them holds it.
    """
    if fcntl is None or jax.process_index() > 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise ValueError(f"checkpoint: another fit is using the folder {folder}; give every fit its own") from None
        except OSError:
            pass  # a file system without locks, as some network file systems are
        yield


def _lock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

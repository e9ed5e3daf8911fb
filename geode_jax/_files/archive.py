"""One file of arrays and a JSON header, without pickle: the format in which posteriors and estimators are saved."""

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any, TypeVar

import equinox as eqx
import numpy as np

from geode_jax import settings as _settings
from geode_jax._files.schema import check_version
from geode_jax._files.whole import written_whole

Settings = TypeVar("Settings")

# Earlier names of settings, as found in files of earlier versions.
_RENAMED_CLASSES = {"NoiseShape": "NoiseCovariance"}
_RENAMED_FIELDS = {("DictionarySettings", "noise_shape"): "noise_covariance"}
# Settings that files of earlier versions lack, with what those versions did.
_ADDED_FIELDS: dict[str, dict[str, Any]] = {
    "DictionarySettings": {"borrowed_rows": None, "refined_cuts": False},
    "Prior": {"noise_rows": None},
}


def write_archive(path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write one ``.npz`` file; it appears whole or not at all. No array may be called ``header``."""
    # as `np.savez` does, which NumPy before 2.2 cannot be told to refuse pickles
    with written_whole(path) as partial, zipfile.ZipFile(partial, "w") as file:
        for name, array in {"header": np.array(json.dumps(header)), **arrays}.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_archive(
    path: str | os.PathLike[str], kind: str, version: int, writer: str, rebuild: Any, argument: str = "path"
) -> Any:
    """Read a file of the format `kind` and return ``rebuild(header, arrays)``.

    `writer` names the method that writes such files, and `argument` the argument that named this one. Raises ValueError
    if the file has another format, is of a later version than `version`, or is damaged; OSError if it cannot be read.
    """
    with open(path, "rb") as stream:
        try:
            return _read(stream, kind, version, rebuild)
        except MemoryError:
            raise
        except Exception as error:  # a damaged file may fail anywhere in zipfile, zlib, NumPy, json and tokenize
            raise ValueError(f"{argument}: expected a file written by {writer}, got {path!s}: {error}") from error


def _read(stream: IO[bytes], kind: str, version: int, rebuild: Any) -> Any:
    if not zipfile.is_zipfile(stream):  # NumPy would take it for a pickle, and say how to load one
        raise ValueError("it is no .npz file, or only a part of one")
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as file:
        _check_members(file.zip, stream)
        header = json.loads(str(file["header"]))
        arrays = {name: file[name] for name in file.files if name != "header"}
    check_version(header, kind, version)
    return rebuild(header, arrays)


def _check_members(file: zipfile.ZipFile, stream: IO[bytes]) -> None:
    """Raise ValueError if the members would take more memory than the file takes on disk: ours are not compressed."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist()):
        raise ValueError("it has compressed arrays, which this package does not write")
    if sum(member.file_size for member in file.infolist()) > os.fstat(stream.fileno()).st_size:
        raise ValueError("its arrays are larger than the file")


def encode(value: Any) -> Any:
    """A settings object as nested dictionaries that name their class; plain values as they are, arrays as lists.

    Raises TypeError for what JSON cannot hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__array__"):  # of NumPy, JAX, pandas, ...
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise TypeError(f"expected numbers, strings, None or settings of this package, got {value!r}")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`; it creates only this package's settings classes, and lists stay lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kinds: dict[str, Any] = {name: kind for name, kind in vars(_settings).items() if dataclasses.is_dataclass(kind)}
    name = str(_RENAMED_CLASSES.get(value["class"], value["class"]))
    fields = {key: decode(item) for key, item in value.items() if key != "class"}
    for (owner, old), new in _RENAMED_FIELDS.items():
        if owner == name and old in fields:
            fields[new] = fields.pop(old)
    return kinds[name](**{**_ADDED_FIELDS.get(name, {}), **fields})


def decode_as(kind: type[Settings], value: Any) -> Settings:
    """:func:`decode` of settings that are a `kind`. Raises ValueError if they are others."""
    found = decode(value)
    if not isinstance(found, kind):
        raise ValueError(f"settings are a {type(found).__name__} where a {kind.__name__} belongs")
    return found


def fields_of(module: Any) -> dict[str, np.ndarray]:
    """Array fields of a module by name, without submodules and fields that are None; empty if `module` is None."""
    if module is None:
        return {}
    values = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    return {name: np.ascontiguousarray(value) for name, value in values.items() if eqx.is_array(value)}


def within(arrays: Mapping[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """Arrays whose name begins with ``part.``, keyed by the rest of the name."""
    return {name.removeprefix(f"{part}."): array for name, array in arrays.items() if name.startswith(f"{part}.")}

"""What arrays a file must hold: their names, types, shapes against each other, and values.

A module's own annotations are its schema: ``Float[Array, "*batch K d"]`` says type and axes, and the same axis has the
same length in every array of a file.
"""

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Sizes = dict[str, int]

_KINDS = {"f": ("float32", "float64"), "i": ("int32", "int64"), "b": ("bool",)}


class Rule(NamedTuple):
    """A condition on the values of an array: ``holds(values, sizes)``, and its words."""

    words: str
    holds: Callable[[np.ndarray, Sizes], bool]


FINITE = Rule("finite numbers", lambda values, _: bool(np.isfinite(values).all()))
POSITIVE = Rule("positive finite numbers", lambda values, _: bool((np.isfinite(values) & (values > 0)).all()))
NOT_NEGATIVE = Rule("finite numbers of at least 0", lambda values, _: bool((np.isfinite(values) & (values >= 0)).all()))
AT_LEAST_ONE = Rule("finite numbers of at least 1", lambda values, _: bool((np.isfinite(values) & (values >= 1)).all()))
LOG_PROBABILITY = Rule("numbers of at most 0", lambda values, _: bool((values <= 1e-5).all()))
SHARE = Rule("numbers between 0 and 1", lambda values, _: bool(((values >= 0) & (values <= 1 + 1e-5)).all()))


def _is_decreasing(values: np.ndarray, sizes: Sizes) -> bool:
    return POSITIVE.holds(values, sizes) and bool((np.diff(values) <= 0).all())


DECREASING = Rule("positive finite numbers, none above the one before it", _is_decreasing)


def _is_root(values: np.ndarray, _: Sizes) -> bool:
    largest = np.abs(values).max(initial=0.0)
    if not np.isfinite(largest) or np.abs(values - values.T).max(initial=0.0) > 1e-6 * largest:
        return False
    return bool(np.linalg.eigvalsh(values).min(initial=np.inf) > 0.0)


POSITIVE_DEFINITE = Rule("a symmetric positive definite matrix", _is_root)


def up_to(axis: str) -> Rule:
    """Integers from 0 to the length of an axis."""

    def holds(values: np.ndarray, sizes: Sizes) -> bool:
        return bool(((values >= 0) & (values <= sizes[axis])).all())

    return Rule(f"integers from 0 to {axis}", holds)


class Member(NamedTuple):
    """An array of a file: its kind of numbers ("f", "i" or "b"), the names of its axes, and a rule for its values."""

    kind: str
    axes: tuple[str, ...]
    rule: Rule = FINITE
    is_optional: bool = False


def members_of(module: type, prefix: str, batch: str, rules: Mapping[str, Rule] | None = None) -> dict[str, Member]:
    """The arrays of a module by their names in a file, ``prefix.field``; its submodules are left out.

    `batch`: the axes that stand for ``*batch``. `rules`: of fields that are not just finite.
    """
    found = {}
    for name, hint in typing.get_type_hints(module).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        annotation = next((one for one in options if hasattr(one, "dim_str")), None)
        if annotation is None:
            continue
        kind = next(kind for kind, names in _KINDS.items() if names[0] in annotation.dtypes)
        axes = tuple(annotation.dim_str.replace("*batch", batch).split())
        rule = (rules or {}).get(name, FINITE)
        found[f"{prefix}.{name}"] = Member(kind, axes, rule, type(None) in options)
    return found


def check_arrays(arrays: Mapping[str, np.ndarray], members: Mapping[str, Member], sizes: Sizes) -> None:
    """Raise ValueError unless `arrays` are exactly these members, with types, shapes and values as they must be.

    `sizes`: lengths of axes that are known beforehand; those of the others are added.
    """
    unknown = arrays.keys() - members.keys()
    missing = {name for name, member in members.items() if not member.is_optional} - arrays.keys()
    if unknown or missing:
        raise ValueError(f"arrays are missing or unknown: {', '.join(sorted(map(repr, missing | unknown)))}")
    for name, array in arrays.items():
        member = members[name]
        if array.dtype.name not in _KINDS[member.kind]:
            raise ValueError(f"{name!r} has dtype {array.dtype.name}, expected one of {', '.join(_KINDS[member.kind])}")
        if array.ndim != len(member.axes):
            raise ValueError(f"{name!r} has shape {array.shape}, expected axes ({', '.join(member.axes)})")
        for axis, length in zip(member.axes, array.shape, strict=True):
            if sizes.setdefault(axis, length) != length:
                raise ValueError(f"{name!r} has {length} entries along axis {axis}, expected {sizes[axis]}")
    for name, array in arrays.items():
        rule = members[name].rule
        if not rule.holds(array, sizes):
            raise ValueError(f"{name!r} holds other values than {rule.words}")


def check_version(header: Mapping[str, Any], kind: str, version: int) -> None:
    """Raise ValueError unless a header is of the format `kind`, in a version of at most `version`."""
    if header.get("format") != kind:
        raise ValueError(f"the header names another format than {kind!r}")
    found = header.get("version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"version {found!r} is not a version")
    if found > version:
        raise ValueError(f"version {found} is newer than this package's {version}")


def check_one_float_type(arrays: Mapping[str, np.ndarray], names: Mapping[str, Member], dtype: np.dtype) -> None:
    """Raise ValueError if any float array among `names` is of another type than `dtype`."""
    for name in names:
        if name in arrays and arrays[name].dtype.kind == "f" and arrays[name].dtype != dtype:
            raise ValueError(f"{name!r} has dtype {arrays[name].dtype.name}, the other arrays {dtype.name}")

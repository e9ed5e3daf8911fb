"""Modules whose arrays are NumPy arrays, in the host's memory, until the sampler moves them to its devices."""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx

Module = TypeVar("Module", bound=eqx.Module)


def on_host(kind: type[Module], **arrays: Any) -> Module:
    """A module with NumPy arrays in fields that are annotated as JAX arrays.

    Not by its constructor, whose types the tests check.
    """
    module = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(module, field.name, arrays.get(field.name, field.default))
    return module


def changed_on_host(module: Module, **arrays: Any) -> Module:
    """The same module but for some of its fields, as by :func:`on_host`."""
    kept = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}  # type: ignore[arg-type]
    return on_host(type(module), **kept | arrays)

"""Modules whose arrays stay NumPy arrays: the sampler takes them to its device, or to several."""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx

Module = TypeVar("Module", bound=eqx.Module)


def on_host(kind: type[Module], **arrays: Any) -> Module:
    """A module of NumPy arrays, where its annotations say JAX arrays, as transformations of trees make it."""
    module = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(module, field.name, arrays.get(field.name, field.default))
    return module

"""How the sampler is compiled: XLA's time to compile it is much of a first fit's."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

# LLVM's second level of optimisation: on a CPU its third takes twice as long, for sweeps that are no faster.
OPTIONS = {"xla_backend_optimization_level": 2}


def quickly_compiled(function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """``jax.jit`` of a function that is never called inside another one, with `OPTIONS` on a CPU.

    Where `jax_disable_most_optimizations` is set it stays as it is, which is faster still to compile.
    """

    @cache
    def program(is_plain: bool) -> Callable[..., Result]:
        return jax.jit(function, compiler_options=None if is_plain else OPTIONS, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        is_plain = jax.config.read("jax_disable_most_optimizations") or jax.default_backend() != "cpu"
        return program(is_plain)(*args, **kwargs)

    return call

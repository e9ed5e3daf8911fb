"""How programs are compiled, and a limit on their number: compilation is much of the time of a first fit."""

import math
import time
from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jaxlib.version

Result = TypeVar("Result")

# LLVM's optimisation level 2: on a CPU it takes up to a quarter less time to compile than level 3, and sweeps are as
# fast to within the noise (`python -m benchmarks.compile_time`).
OPTIONS = {"xla_backend_optimization_level": 2}
# For a program that runs for less time than it takes to optimise: a third of the time to compile, and four to six times
# that to run (the same benchmark). Fusion emitters are how XLA writes loops; from version 0.11 on it has no other way.
SHORT_OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jaxlib.version.__version_info__ < (0, 11):
    SHORT_OPTIONS["xla_cpu_use_fusion_emitters"] = False

# Linux: memory mappings of this process, one per line, and how many it may have.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# In this time one or two programs are compiled, which hold a few hundred mappings each.
SECONDS_BETWEEN_LOOKS = 1.0
_last_look = [-math.inf]
# How many mappings were left when programs were last dropped: they were others'.
_left = [0]


def drop_programs_if_many() -> None:
    """Drop compiled programs if this process has more than half of the memory mappings that Linux allows.

    Every program holds some, and XLA crashes at the limit of 65,530: after about a hundred fits to data of different
    shapes, as in a search over settings. A dropped program that is needed again is recompiled, or read from JAX's
    persistent cache. Where most mappings are not those of programs, these are dropped again only after many more.
    """
    try:
        used, most = _num_mappings(), int(MOST_MAPPINGS.read_text())
    except (OSError, ValueError):  # not Linux
        return
    if used > most // 2 and used - _left[0] > most // 8:
        jax.clear_caches()
        _left[0] = _num_mappings()


def drop_programs_at_times() -> None:
    """:func:`drop_programs_if_many`, but it looks at most once a second: to count mappings takes some milliseconds.

    For predictions, each of which may compile a program or none.
    """
    if time.monotonic() - _last_look[0] > SECONDS_BETWEEN_LOOKS:
        _last_look[0] = time.monotonic()
        drop_programs_if_many()


def _num_mappings() -> int:
    return MAPPINGS.read_bytes().count(b"\n")


class Program(Generic[Result]):
    """A function that is compiled when it is called, or before by :meth:`compile`.

    `is_short`: whether it will run for so little time that it is to be compiled with `SHORT_OPTIONS`.
    """

    def __init__(self, function: Callable[..., Result], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._jitted = cache(
            lambda is_plain, is_short: jax.jit(
                function, compiler_options=None if is_plain else SHORT_OPTIONS if is_short else OPTIONS, **options
            )
        )

    def __call__(self, *args: Any, is_short: bool = False, **kwargs: Any) -> Result:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._function(*args, **kwargs)
        return self._chosen(is_short)(*args, **kwargs)

    def compile(self, *args: Any, is_short: bool = False, **kwargs: Any) -> Any:
        """Compile for arguments that have shapes in place of arrays, given as in the call that is to follow.

        JAX keeps what was compiled, so that the call need not compile again. Returns the shapes of the result.
        """
        lowered = self._chosen(is_short).lower(*args, **kwargs)
        lowered.compile()
        return lowered.out_info

    def _chosen(self, is_short: bool) -> Any:
        is_plain = _is_plain()
        return self._jitted(is_plain, is_short and not is_plain)


def _is_plain() -> bool:
    return jax.config.read("jax_disable_most_optimizations") or jax.default_backend() != "cpu"


def quickly_compiled(function: Callable[..., Result], **options: Any) -> Program[Result]:
    """``jax.jit`` with `OPTIONS` on a CPU, and without them on other devices.

    Called with tracers, it calls `function` directly: the options of the enclosing program apply. Where
    `jax_disable_most_optimizations` is set it is plain ``jax.jit``, which compiles faster still.
    """
    return Program(function, options)

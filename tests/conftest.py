"""Shared set-up: runtime shape checks, one compilation cache, one small problem that every sampler test shares."""

import os
from pathlib import Path

import jax
from jaxtyping import install_import_hook

# Annotated shapes are enforced in the tests and cost users nothing. The public boundary has checks of its own, whose
# messages the tests read.
_CORE = ("dictionary", "gibbs", "math", "model", "state", "statistics", "tree")
_PREDICT = ("density", "draw", "impute", "partial")
install_import_hook(
    [f"geode_jax.{name}" for name in _CORE] + [f"geode_jax.predict.{name}" for name in _PREDICT], "beartype.beartype"
)

_cache = Path(os.environ.get("GEODE_JAX_TEST_CACHE", Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

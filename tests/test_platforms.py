"""Programs for devices that are not at hand: they lower for a GPU and a TPU, and hold nothing that these lack."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from conftest import DICTIONARY

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest.device_candidates import _best_nodes, _statistics_at
from geode_jax.forest.device_products import _inner, _moments, _product
from geode_jax.gibbs.run import SegmentOptions, _segment, _start
from geode_jax.settings import Prior, RankAdaptation, SamplerSettings


@pytest.fixture(scope="module")
def lowered(data):
    """The text of a segment of sweeps by platform, for 90 complete rows and two trees of depth 5."""
    settings = geode_jax.DictionarySettings(num_trees=2, max_rank=3, depth=5, min_cell_size=2, num_candidates=63)
    forest = geode_jax.learn_forest(jax.random.key(0), data, dictionary=settings)
    return _texts(forest)


def _texts(forest):
    problem = forest.problem(Prior(), SamplerSettings())
    keys = jax.random.split(jax.random.key(0), (forest.num_trees, 1))
    chains = jax.eval_shape(_start, keys, problem)
    options = SegmentOptions(5, RankAdaptation())
    segment = jax.jit(_segment.__wrapped__, static_argnames="options")
    traced = segment.trace(keys, chains, problem, np.int32(0), np.int32(5), options=options)
    return {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda", "tpu")}


def test_no_host_callbacks_no_libraries_no_float64(lowered):
    for platform in ("cuda", "tpu"):
        calls = set(re.findall(r"custom_call @([\w.]+)", lowered[platform]))
        assert calls <= {"Sharding", "cu_threefry2x32_ffi"}, platform
        assert "f64" not in lowered[platform]


@pytest.mark.slow
def test_rows_with_missing_features_factor_matrices_and_no_more(data):
    partial = np.array(data)
    partial[:20, 1] = np.nan
    texts = _texts(geode_jax.learn_forest(jax.random.key(0), partial, dictionary=DICTIONARY))
    calls = set(re.findall(r"custom_call @([\w.]+)", texts["cuda"]))
    assert calls <= {"cu_threefry2x32_ffi", "cusolver_potrf_ffi"}
    assert "callback" not in "".join(texts.values())


def test_only_a_cpu_draws_a_node_by_one_comparison_after_another(lowered):
    """Unrolled over all nodes, the draw took minutes to compile for a GPU."""
    count = {platform: len(re.findall("stablehlo.compare", text)) for platform, text in lowered.items()}
    assert count["cpu"] > count["cuda"] + 50
    assert count["cuda"] == count["tpu"]


def test_stage_one_for_a_gpu_has_no_libraries_and_float64_for_moments_only():
    """Of rows in float32, with JAX's 64-bit types on, so that any other would show."""

    def real(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    nodes = real(7, 10), real(7, 10, 3)
    programs = {
        "moments": (_moments, (real(64, 10), jax.ShapeDtypeStruct((), np.int32))),
        "inner": (_inner, (real(64, 10),)),
        "product": (_product, (real(64, 10), real(10, 3))),
        "best nodes": (partial(_best_nodes, width=2), ((*nodes, real(7), real(7), real(7, 3)), real(64, 10))),
        "statistics": (_statistics_at, (*nodes, real(64, 10), jax.ShapeDtypeStruct((64, 2), np.int32))),
    }
    for name, (function, shapes) in programs.items():
        with jax_settings(np.float64):
            text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert not re.findall(r"custom_call @([\w.]+)", text), name
        assert ("f64" in text) == (name == "moments"), name

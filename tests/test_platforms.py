"""Programs for devices that are not at hand: they lower for a GPU and a TPU, and hold nothing that these lack."""

import re

import jax
import numpy as np
import pytest
from conftest import DICTIONARY

import geode_jax
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

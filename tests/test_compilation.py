"""Programs that are compiled with options of their own, as users compile them, and inside other programs."""

from unittest import mock

import jax
import numpy as np
import pytest
from conftest import DICTIONARY, SAMPLER

import geode_jax
from geode_jax._runtime import compilation
from geode_jax._runtime.compilation import OPTIONS, quickly_compiled


@pytest.fixture
def as_users_compile():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@quickly_compiled
def double(x):
    return 2 * x


@pytest.mark.usefixtures("as_users_compile")
def test_inside_other_programs():
    """JAX takes options of compilation of the outermost program only."""
    assert jax.eval_shape(double, np.ones(3)).shape == (3,)
    np.testing.assert_array_equal(jax.jit(double)(np.ones(3)), 2.0)
    np.testing.assert_array_equal(double(np.ones(3)), 2.0)


@pytest.mark.usefixtures("as_users_compile")
def test_options_are_used_unless_optimisations_are_off():
    used = []
    with mock.patch.object(jax, "jit", lambda function, compiler_options: used.append(compiler_options) or function):
        triple = quickly_compiled(lambda x: 3 * x)
        triple(1.0)
        jax.config.update("jax_disable_most_optimizations", True)
        triple(1.0)
    assert used == [OPTIONS, None]


@pytest.mark.parametrize(("used", "drops"), [(51, 2), (49, 0)])
def test_fits_make_room_before_there_are_too_many_programs(tmp_path, monkeypatch, data, used, drops):
    """Of 100 mappings that the system allows: at the start of both stages."""
    for name, text in (("MAPPINGS", "mapping\n" * used), ("MOST_MAPPINGS", "100\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(compilation, name, tmp_path / name)
    with mock.patch.object(jax, "clear_caches") as clear:
        geode_jax.fit(jax.random.key(0), data, dictionary=DICTIONARY, sampler=SAMPLER)
    assert clear.call_count == drops


def test_other_systems_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "MAPPINGS", tmp_path / "none")
    with mock.patch.object(jax, "clear_caches") as clear:
        compilation.drop_programs_if_many()
    assert clear.call_count == 0

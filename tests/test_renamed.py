"""Names that have changed work for one more minor version, and say what they are called now."""

import dataclasses

import pytest

import geode_jax
from geode_jax import DictionarySettings, NoiseCovariance
from geode_jax._files.archive import decode, encode


def test_noise_shape():
    with pytest.warns(DeprecationWarning, match="NoiseShape is called NoiseCovariance now"):
        old = geode_jax.NoiseShape
    assert old is NoiseCovariance
    with pytest.warns(DeprecationWarning, match="DictionarySettings.noise_shape is called noise_covariance now"):
        settings = DictionarySettings(noise_shape=None)
    assert settings == DictionarySettings(noise_covariance=None)
    with pytest.warns(DeprecationWarning, match="noise_covariance now"):
        assert settings.noise_shape is None
    with pytest.warns(DeprecationWarning, match="noise_covariance now"):
        assert dataclasses.replace(settings, noise_shape=old(7)).noise_covariance == NoiseCovariance(7)


def test_files_with_old_names():
    """Are read without a word: who reads them did not write the names."""
    header = encode(DictionarySettings(noise_covariance=NoiseCovariance(7)))
    header["noise_shape"] = {**header.pop("noise_covariance"), "class": "NoiseShape"}
    assert decode(header) == DictionarySettings(noise_covariance=NoiseCovariance(7))


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="has no attribute 'NoiseForm'"):
        geode_jax.NoiseForm  # noqa: B018

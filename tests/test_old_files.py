"""Files of every format version that there has been still load, and say what they said."""

import numpy as np
import pytest
from sample_files import FILES, rows

import geode_jax


@pytest.mark.parametrize("version", [1, 2])
def test_sample_files(version):
    x, expected = rows(), np.load(FILES / f"expected_{version}.npz")
    density = geode_jax.GeodeDensity.load(FILES / f"density_{version}.npz")
    np.testing.assert_allclose(density.score_samples(x), expected["density"], rtol=1e-4)
    posterior = geode_jax.Posterior.load(FILES / f"posterior_{version}.npz")
    np.testing.assert_allclose(geode_jax.log_density(posterior, x), expected["density"], rtol=1e-4)
    classifier = geode_jax.GeodeClassifier.load(FILES / f"classifier_{version}.npz")
    np.testing.assert_allclose(classifier.predict_proba(x), expected["classifier"], atol=1e-4)
    assert classifier.classes_.tolist() == ["down", "up"]

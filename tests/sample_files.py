"""Writes the sample files of the current format version: ``python tests/sample_files.py``, once per version."""

from pathlib import Path

import numpy as np

import geode_jax

FILES = Path(__file__).parent / "files"
VERSION = 2


def rows() -> np.ndarray:
    """What the models were fitted to."""
    rng = np.random.default_rng(0)
    return np.cos(rng.uniform(0, 3, (40, 1)) + np.arange(4)) + 0.1 * rng.normal(size=(40, 4))


if __name__ == "__main__":
    options = {"num_trees": 1, "depth": 1, "max_rank": 2, "num_warmup": 20, "num_samples": 3, "random_state": 0}
    x = rows()
    density = geode_jax.GeodeDensity(**options).fit(x)
    classifier = geode_jax.GeodeClassifier(**options).fit(x, np.where(x[:, 0] > 0, "up", "down"))
    density.save(FILES / f"density_{VERSION}.npz")
    density.posterior_.save(FILES / f"posterior_{VERSION}.npz")
    classifier.save(FILES / f"classifier_{VERSION}.npz")
    np.savez(
        FILES / f"expected_{VERSION}.npz", density=density.score_samples(x), classifier=classifier.predict_proba(x)
    )

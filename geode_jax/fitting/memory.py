"""Whether a fit has room in memory, said before it begins."""

import os
import warnings

from geode_jax.settings import DictionarySettings, SamplerSettings


def bytes_needed(
    dictionary: DictionarySettings,
    sampler: SamplerSettings,
    num_rows: int,
    num_features: int,
    itemsize: int,
    *,
    is_mapped: bool = False,
) -> dict[str, int]:
    """Bytes of the large arrays of a fit of (n, D) numbers, with settings that leave nothing to the data's shape.

    Dictionaries are learned once from all rows and once without each fold. Of rows with missing features the sampler
    keeps other arrays (:class:`geode_jax.MissingRows`). `is_mapped`: complete rows of a mapped file are not copied.
    """
    assert dictionary.depth is not None
    assert dictionary.max_rank is not None
    assert dictionary.num_candidates is not None
    nodes = dictionary.num_trees * (2 ** (dictionary.depth + 1) - 1)
    pairs = dictionary.num_trees * num_rows * dictionary.num_candidates
    groups = 1 if dictionary.cross_fit is None else 1 + dictionary.cross_fit.num_folds
    draws = nodes * sampler.num_chains * sampler.num_samples
    shape = dictionary.noise_shape
    # beside the rows, those whitened for one dictionary
    copies = 1 if shape is None or num_features > shape.max_features else 2
    return {
        "rows": itemsize * (copies - is_mapped) * num_rows * num_features,
        "dictionaries": itemsize * groups * nodes * num_features * (dictionary.max_rank + 1),
        "statistics": itemsize * pairs * (dictionary.max_rank + 1),
        "draws": draws * (2 * itemsize + 1) * dictionary.max_rank,
    }


def warn_if_too_large(needed: dict[str, int]) -> None:
    """A RuntimeWarning where the sum is more than this machine's memory, with the parts and what to do."""
    available = _physical_memory()
    if available is None or sum(needed.values()) <= available:
        return
    parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in needed.items())
    warnings.warn(
        f"the fit needs about {sum(needed.values()) / 2**30:.1f} GiB ({parts}) and this machine has"
        f" {available / 2**30:.1f}; fewer trees, a smaller depth, max_rank, num_candidates or num_samples, or float32"
        " need less",
        RuntimeWarning,
        stacklevel=4,
    )


def _physical_memory() -> int | None:
    """Bytes of memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None

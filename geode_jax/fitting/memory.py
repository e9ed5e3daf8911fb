"""How much memory a fit needs, and a warning before a fit that does not fit."""

import os

from geode_jax._runtime.warning import warn_user
from geode_jax.forest.plan import Plan
from geode_jax.rows.row_space import is_kept_in_space, uses_row_space
from geode_jax.settings import SamplerSettings


def bytes_needed(
    plan: Plan, sampler: SamplerSettings, itemsize: int, *, num_rows: int | None = None, is_mapped: bool = False
) -> dict[str, int]:
    """Bytes of the large arrays of a fit.

    Dictionaries are learned once from all rows and once without each fold. The sampler's additional arrays for rows
    with missing features (:class:`geode_jax.MissingRows`) are not counted. `num_rows`: those of this process, where
    that is not all. `is_mapped`: complete rows of a memory-mapped file are not copied.
    """
    num_rows = plan.num_rows if num_rows is None else num_rows
    num_trees, rank = plan.request.num_trees, plan.max_rank
    nodes = num_trees * plan.num_nodes
    is_divided, width = num_rows < plan.num_rows, plan.num_candidates(rank)
    pairs = num_trees * num_rows * width
    # where rows have candidates, which these are and where their statistics are stored
    of_pair = itemsize * (rank + 1) + (8 if width < plan.num_nodes else 0)
    # the rows of every cell, and a row's fold; neighbours of the rows that trees are learned from, and a copy of these
    places = 8 * num_rows * (num_trees * (plan.tree.depth + 1) + 1)
    is_wide = plan.num_partial == 0 and uses_row_space(plan.num_rows, plan.num_features)
    is_copied = is_wide or is_mapped or is_divided or plan.tree_rows < plan.num_rows
    copied = is_copied * itemsize * (plan.num_rows if is_wide else plan.num_features)
    graph = plan.tree_rows * (copied + 24 * plan.tree.num_neighbors)
    draws = nodes * sampler.num_chains * sampler.num_samples
    # the rows, and a copy whitened for one dictionary at a time, or in units of the noise while missing values are
    # filled in; rows with missing values as they are filled for each dictionary, if there are more than two folds
    is_whitened = plan.tries_noise_covariance and not is_wide and not (is_mapped and is_divided)
    copies = 2 if is_whitened or plan.num_partial > 0 else 1
    fillings = plan.num_holdouts if plan.num_holdouts > 3 else 1
    if plan.num_partial > 0 and is_whitened:  # and as they were filled before
        fillings *= 2
    held = (copies - is_mapped) * num_rows + fillings * min(plan.num_partial, num_rows)
    # with far fewer rows than features, coordinates of dictionaries are those in the space of the rows; its axes are
    # there until the dictionaries have all features, and remain where these stay in the space
    coordinates = kept = plan.num_features
    of_space = 0
    if is_wide:
        coordinates, of_space = plan.num_rows, plan.num_rows * plan.num_features
        if is_kept_in_space(plan.num_features, plan.num_rows, nodes, rank, itemsize):
            kept = coordinates
    return {
        "rows": itemsize * held * plan.num_features,
        "dictionaries": itemsize * (nodes * ((plan.num_holdouts - 1) * coordinates + kept) * (rank + 1) + of_space),
        "trees": places + graph,
        "statistics": of_pair * pairs,
        # a sweep of every chain has the rows' statistics at their nodes, and the scores of all nodes a row may be at
        "chains": itemsize * num_trees * sampler.num_chains * num_rows * (rank + width),
        "draws": draws * (2 * itemsize + 1) * rank,
    }


def warn_if_too_large(needed: dict[str, int]) -> None:
    """Warn (RuntimeWarning) if the sum exceeds this machine's memory, with the parts and what to do."""
    available = _physical_memory()
    if available is None or sum(needed.values()) <= available:
        return
    parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in needed.items())
    warn_user(
        f"the fit needs about {sum(needed.values()) / 2**30:.1f} GiB ({parts}) and this machine has"
        f" {available / 2**30:.1f}; fewer trees, a smaller depth, max_rank, num_candidates or num_samples, or float32"
        " need less"
    )


def _physical_memory() -> int | None:
    """Bytes of memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None

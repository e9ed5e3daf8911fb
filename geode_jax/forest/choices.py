"""What the first tree's held-out rows decide: a shared span, a noise covariance, the rank."""

import dataclasses

import numpy as np

from geode_jax._runtime.buffers import release_free_memory
from geode_jax.learning.evidence import LARGEST_SAMPLE, Evidence, cross_fitted_evidence
from geode_jax.learning.noise_covariance import (
    Shape,
    choose_shapes,
    learn_covariances,
)
from geode_jax.learning.shared_span import Span, choose_span, learn_dictionaries, learn_whole_span
from geode_jax.partition.metis import Partition
from geode_jax.rows.completed import Completed
from geode_jax.rows.folds import judging_folds
from geode_jax.settings import DictionarySettings, SharedSpan


def _choose(
    completed: Completed,
    is_observed: np.ndarray | None,
    settings: DictionarySettings,
    partition: Partition,
    folds: np.ndarray | None,
    seed: int,
    num_features: int,
    *,
    may_lower_rank: bool,
    may_have_shape: bool,
) -> tuple[Span | None, list[Shape] | None, DictionarySettings]:
    """A shared span, or a shape of the noise, or neither, and settings that tell what was found, by the first tree."""
    assert settings.max_rank is not None
    x = completed.x
    shared, parent_rows = settings.shared_span, settings.parent_rows or 0.0
    span, shapes, noise_shape, gain = None, None, settings.noise_shape, 0.0
    may_have_shape &= noise_shape is not None and num_features <= noise_shape.max_features
    largest_rank = settings.max_rank

    def rank_by(evidence: Evidence) -> int:
        return evidence.needed_rank() if may_lower_rank else largest_rank

    if shared is not None and shared.rank is not None:
        span = learn_whole_span(completed, folds, seed, shared.rank)
        if span.bases.shape[2] == 0:  # too few rows for any direction
            span = None
    elif folds is not None and (shared is not None or may_lower_rank or may_have_shape):
        judging = judging_folds(folds, LARGEST_SAMPLE)
        own = learn_dictionaries(completed, partition, settings.max_rank, judging, seed, parent_rows)
        evidence = cross_fitted_evidence(x, partition, own, judging, is_observed, num_features)
        without = evidence.log_likelihood()
        needed_rank = rank_by(evidence)
        del own, evidence  # may be as large as the data
        if shared is not None:
            found = choose_span(
                completed, partition, settings.max_rank, judging, seed, without, parent_rows, is_observed, num_features
            )
            if found is not None:
                span, gain = found.span, found.gain
                needed_rank = rank_by(found.evidence)
            del found
        if may_have_shape:
            release_free_memory()
            chosen = choose_shapes(x, partition, settings.max_rank, judging, seed, without, parent_rows)
            if chosen is not None and chosen.gain > gain:
                covariances = chosen.covariances if judging is folds else learn_covariances(x, folds)
                span, shapes = None, covariances.shapes(chosen.deviation)
                needed_rank = rank_by(chosen.evidence)
        if span is not None and judging is not folds:
            span = learn_whole_span(completed, folds, seed, span.bases.shape[2])
        settings = dataclasses.replace(settings, max_rank=needed_rank)
    settings = dataclasses.replace(settings, shared_span=None, noise_shape=None if shapes is None else noise_shape)
    if span is None:
        return None, shapes, settings
    # no node has more directions than the span
    rank = span.bases.shape[2]
    assert settings.max_rank is not None
    return (
        span,
        None,
        dataclasses.replace(settings, shared_span=SharedSpan(rank), max_rank=min(settings.max_rank, rank)),
    )

"""Choices that held-out rows of the first tree decide: a shared span, a noise covariance, the rank.

A span and a noise covariance are tried separately; the one of larger gain is used, or neither.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from geode_jax._runtime.buffers import release_free_memory
from geode_jax.forest.plan import Plan
from geode_jax.learning.evidence import LARGEST_SAMPLE, Evidence, cross_fitted_evidence
from geode_jax.learning.noise_covariance import (
    NoiseRoot,
    NoiseTrial,
    is_worth_its_cost,
    learn_covariances,
    try_noise_covariance,
)
from geode_jax.learning.shared_span import Span, learn_dictionaries, learn_whole_span, try_spans
from geode_jax.learning.subspaces import SubspaceOptions, Subspaces
from geode_jax.model.found import Decision
from geode_jax.partition.metis import Partition
from geode_jax.rows.training import Training
from geode_jax.rows.unseen import numbers_of

# Numbers of the matrices that say what rows with missing entries do not show of whitened coordinates.
MOST_UNSEEN = 2**27


class Chosen(NamedTuple):
    """A span shared by all nodes, or roots of the noise covariance, or neither; directions per node; and the reasons.

    `roots`: of all rows, and without each fold. `first`: the first tree's dictionaries, where the trial that
    decided has learned just these; of rows with missing values they may have more directions than `rank`.
    """

    span: Span | None
    roots: list[NoiseRoot] | None
    rank: int
    decisions: tuple[Decision, ...]
    first: Subspaces | None = None


def choose(training: Training, plan: Plan, partition: Partition, seed: int) -> Chosen:
    """Choose the span or noise covariance, and the rank, of all dictionaries, judged on the first tree."""
    if plan.span_rank > 0:
        return _given_span(training, plan, seed)
    if not (plan.tries_spans or plan.tries_noise_covariance or plan.seeks_rank):
        return Chosen(None, None, plan.max_rank, (_about_rank(plan.max_rank, plan),))
    judging = training.judging(LARGEST_SAMPLE)
    options = plan.subspaces(plan.max_rank, seed)
    plain = _judge_plain(judging, plan, partition, options)
    span = _nothing(plain)
    if plan.tries_spans:
        span = _judge_spans(judging, plan, partition, options, plain)
    noise = _nothing(plain)
    if plan.tries_noise_covariance:
        release_free_memory()
        noise = _judge_noise(judging, plan, partition, options, plain)
    taken = noise if noise.gain > span.gain else span
    shared, roots, rank, first = taken.span, None, taken.rank, None
    # the trials may have used the folds of only some rows
    is_whole = judging.folds is training.folds
    if shared is not None:
        shared = shared if is_whole else learn_whole_span(training, seed, shared.bases.shape[2])
        rank = min(rank, shared.bases.shape[2])
    elif taken.noise is not None:
        own = taken.noise.covariances if is_whole else learn_covariances(training)
        roots = own.roots(taken.noise.deviation)
        is_first = is_whole and (rank == options.max_rank or training.is_observed is not None)
        first = taken.noise.subspaces if is_first else None
    about_span = _told(span, taken, "none", "a noise covariance gains more")
    about_noise = _told(noise, taken, "isotropic", "a span gains more")
    return Chosen(shared, roots, rank, (*about_span, *about_noise, _about_rank(rank, plan, shared)), first)


def _told(outcome: "_Outcome", taken: "_Outcome", nothing: str, why: str) -> tuple[Decision, ...]:
    """The decisions of an outcome; one that would do, but another gains more, is not taken."""
    if outcome is taken or outcome.gain <= 0.0:
        return outcome.decisions
    return tuple(dataclasses.replace(decision, taken=nothing, why=f"{why} than this") for decision in outcome.decisions)


def _given_span(training: Training, plan: Plan, seed: int) -> Chosen:
    span = learn_whole_span(training, seed, plan.span_rank)
    found = span.bases.shape[2]
    why = "not tried with a span of given rank"
    about_noise = (Decision("noise covariance", "isotropic", why),) if plan.tries_noise_covariance else ()
    if found == 0:
        nothing = Decision("shared span", "none", "too few rows for any direction")
        return Chosen(None, None, plan.max_rank, (nothing, *about_noise, _about_rank(plan.max_rank, plan)))
    rank = min(plan.max_rank, found)
    about_span = Decision("shared span", f"{found} directions", "as given")
    return Chosen(span, None, rank, (about_span, *about_noise, _about_rank(rank, plan, span)))


def _about_rank(rank: int, plan: Plan, span: Span | None = None) -> Decision:
    """Where the number of directions per node comes from."""
    if span is not None and rank == span.bases.shape[2]:
        why = "all of the span's"
    elif plan.request.max_rank is not None:
        why = "as given" if rank == plan.request.max_rank else "the most that the data allow"
    elif plan.seeks_rank and plan.span_rank == 0:
        why = "1.5 times what held-out rows support"
    else:
        why = "the most that are considered for data of this size"
    return Decision("directions per node", str(rank), why)


class _Plain(NamedTuple):
    """Log likelihood of the judged rows, and the rank, with no shared span and isotropic noise."""

    log_likelihood: np.ndarray
    rank: int


class _Outcome(NamedTuple):
    """The span or noise covariance that passed its trial, or neither; the rank; the gain (0 if neither); and why."""

    span: Span | None
    noise: NoiseTrial | None
    rank: int
    gain: float
    decisions: tuple[Decision, ...]


def _nothing(plain: "_Plain", *decisions: Decision) -> _Outcome:
    """What a trial leaves when neither a span nor a noise covariance passed it."""
    return _Outcome(None, None, plain.rank, 0.0, decisions)


def _rank_by(evidence: Evidence, plan: Plan) -> int:
    return max(plan.least_rank, evidence.needed_rank()) if plan.seeks_rank else plan.max_rank


def _judge_plain(judging: Training, plan: Plan, partition: Partition, options: SubspaceOptions) -> _Plain:
    own = learn_dictionaries(judging, partition, options)
    evidence = cross_fitted_evidence(judging, partition, own)
    return _Plain(evidence.log_likelihood(), _rank_by(evidence, plan))


def _judge_spans(
    judging: Training, plan: Plan, partition: Partition, options: SubspaceOptions, plain: _Plain
) -> _Outcome:
    trial = try_spans(judging, partition, options, plain.log_likelihood)
    if trial is None:
        decision = Decision("shared span", "none", "no span of few enough directions holds the data")
        return _nothing(plain, decision)
    why = f"gain of nodes within {trial.rank} common directions"
    if not trial.is_taken:
        return _nothing(plain, Decision("shared span", "none", why, *trial.gain))
    decision = Decision("shared span", f"{trial.rank} directions", why, *trial.gain)
    return _Outcome(trial.span, None, _rank_by(trial.evidence, plan), trial.gain.mean, (decision,))


def _judge_noise(
    judging: Training, plan: Plan, partition: Partition, options: SubspaceOptions, plain: _Plain
) -> _Outcome:
    seen = judging.is_observed
    if seen is not None and numbers_of(seen) > MOST_UNSEEN:
        why = "too many values are missing to try it"
        return _nothing(plain, Decision("noise covariance", "isotropic", why))
    trial = try_noise_covariance(judging, partition, options, plain.log_likelihood)
    why = "gain of noise that is not isotropic"
    missing = 0.0 if seen is None else 1.0 - float(seen.mean())
    if not is_worth_its_cost(trial.gain, plan.num_features, missing):
        return _nothing(plain, Decision("noise covariance", "isotropic", why, *trial.gain))
    decision = Decision("noise covariance", "full", why, *trial.gain)
    return _Outcome(None, trial, _rank_by(trial.evidence, plan), trial.gain.mean, (decision,))

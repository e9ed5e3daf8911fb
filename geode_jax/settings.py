"""Options of a fit as small frozen dataclasses, validated on construction."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from geode_jax._checks import check_instance, check_integer, check_number

Kind = TypeVar("Kind")


def _convert(settings: Any, name: str, check: Callable[..., Any], *args: Any, **limits: Any) -> Any:
    """Check a field, and keep what the check makes of it: settings that are equal are then saved alike."""
    value = check(getattr(settings, name), name, *args, **limits)
    object.__setattr__(settings, name, value)
    return value


def _convert_if_given(settings: Any, name: str, check: Callable[..., Any], *args: Any, **limits: Any) -> None:
    if getattr(settings, name) is not None:
        _convert(settings, name, check, *args, **limits)


@dataclasses.dataclass(frozen=True)
class CrossFit:
    """Statistics of a row come from a dictionary that never saw the row.

    Each row is in one fold, the same for every node; the dictionary is learned once more without each fold.
    """

    num_folds: int = 5

    def __post_init__(self) -> None:
        _convert(self, "num_folds", check_integer, 2)


@dataclasses.dataclass(frozen=True)
class FeatureNoise:
    """A noise scale per feature: the noise covariance is ``sigma2 * diag(scale**2)`` instead of ``sigma2 * I``.

    The scales are root-mean-square cross-fitted residuals off the local subspaces, from `num_folds` folds, iterated
    `num_rounds` times, with geometric mean 1. They are shrunk towards each other as far as their differences are
    estimation errors (empirical Bayes), and are at least `floor` times their mean, which is what a constant or nearly
    constant feature gets. If held-out rows show that features are in different units, each feature is first divided by
    its own unit: the root of its mean fourth power over three times its mean square, which is the standard deviation of
    a normal one.
    """

    num_rounds: int = 3
    num_folds: int = 5
    floor: float = 0.05

    def __post_init__(self) -> None:
        _convert(self, "num_rounds", check_integer, 1)
        _convert(self, "num_folds", check_integer, 2)
        _convert(self, "floor", check_number, above=0.0, below=1.0)


@dataclasses.dataclass(frozen=True)
class SharedSpan:
    """Centres and directions of all nodes lie in the span of the leading directions of the whole data.

    What is outside is noise at every node, so that nodes learn `rank` coordinates instead of D. None chooses the rank
    by cross-fitted likelihood, where no span is one of the choices. Without `cross_fit`, None means no span.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        _convert_if_given(self, "rank", check_integer, 1)


@dataclasses.dataclass(frozen=True)
class NoiseCovariance:
    """The noise has a full covariance, ``sigma2 * R R``, the same for all nodes up to the factor sigma2.

    The eigenvectors of R are the principal axes of the whole data, its eigenvalues come from the residuals of the nodes
    along them; both are learned without the rows that they are judged on (`learning/noise_covariance.py`). The
    covariance is used if it improves the cross-fitted likelihood: where features correlate beyond a few directions, as
    neighbouring pixels do. With at least twice as many features as rows, it is along the axes of the space that the
    rows span, and of one variance in all other directions.

    It is not tried with more than `max_features` features, or in the space of more rows than that, as its cost grows
    with the cube of their number; where training rows miss values, if there are twice as many features as rows, or if
    the number of these rows times the square of the most values that one of them misses is more than 2^27; with a span
    of given rank; without `cross_fit`; and in :func:`geode_jax.fit_classes`. Where values are missing it must gain
    more, and rows are filled in once more under it.
    """

    max_features: int = 1000

    def __post_init__(self) -> None:
        _convert(self, "max_features", check_integer, 1)


@dataclasses.dataclass(frozen=True)
class MissingRows:
    """How a fit treats rows with missing features.

    - `num_candidates` (default None): nodes that such a row may belong to; None is 6.
    - `num_groups` (default None): each sweep updates one of this many groups of these rows, so that a row is updated in
      every `num_groups`-th sweep; None takes 1 to 4, by cost.

    The sampler keeps two (d, d) matrices per tree, row and candidate, ``8 F n_m M d**2`` bytes in float32 for n_m such
    rows (with few patterns of missing features: per tree, pattern, fold and node).
    """

    num_candidates: int | None = None
    num_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_candidates", "num_groups"):
            _convert_if_given(self, name, check_integer, 1)


# The most scales below the root: a tree of so many has room for 17 million leaves.
MOST_DEPTH = 24


def _renamed(old: str, new: str) -> Callable[[type[Kind]], type[Kind]]:
    """Let a settings class accept and return the field `new` under its `old` name too, with a DeprecationWarning."""

    def warn(name: str) -> None:
        warnings.warn(f"{name}.{old} is called {new} now", DeprecationWarning, stacklevel=3)

    def decorate(kind: type[Kind]) -> type[Kind]:
        original = kind.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if old in kwargs:
                warn(kind.__name__)
                kwargs[new] = kwargs.pop(old)  # beside the new one where `dataclasses.replace` gives all fields
            original(self, *args, **kwargs)

        def get(self: Any) -> Any:
            warn(kind.__name__)
            return getattr(self, new)

        kind.__init__ = init  # type: ignore[method-assign]
        setattr(kind, old, property(get))
        return kind

    return decorate


@_renamed("noise_shape", "noise_covariance")
@dataclasses.dataclass(frozen=True)
class DictionarySettings:
    """How stage one learns the trees and their dictionaries.

    - `max_rank` (default None): directions per node. None chooses the number by held-out likelihood, adds half as many
      again, and takes at most 100; in a span of given rank, all of its directions up to that limit; without
      `cross_fit`, half of the features, at least 10 and at most 100.
    - `depth` (default None): scales of a tree below the root, at most 24; None chooses by the number of rows.
    - `num_trees` (default 8): trees that are averaged.
    - `num_neighbors` (default None): neighbours per row in the graph; None chooses by the number of rows.
    - `tree_rows` (default None): rows that a tree's graph and cuts are learned from, different ones for every tree; the
      other rows descend from the root to the nearer centre. None: all rows, up to 100,000.
    - `min_cell_size` (default None): smallest number of rows in a cell; None is 5, or 10 without `borrowed_rows`, and
      less with few rows.
    - `refined_cuts` (default True): of several trees, in every second one, the first included, rows go over to the side
      of a cut whose normal distribution describes them better. This is for tables of 4 to 50 features, of which
      training rows miss none. A cut stays as it is where a side has fewer than 6 rows, or fewer than features vary in
      the cell, or where fewer than 4 vary; so do all of trees of a part of the rows, or of a class. False, as in the
      paper, leaves all cuts as METIS makes them.
    - `num_candidates` (default None): nodes of each tree that a row may belong to. Memory and time of the sampler are
      proportional to it, and ``Posterior.lost_mass`` says how much mass it leaves out. None: all of up to 31 nodes, and
      16 of more, or 8 to 15 where their statistics would take more than 1 GiB.
    - `parent_rows` (default 3.0): how many rows the parent's covariance counts for in that of a cell; None, as in the
      paper, lets cells share nothing.
    - `borrowed_rows` (default 5.0): how many rows of its parent's cell, each about the centre of its own cell, count as
      rows of a node when the sampler learns the node's variances; None, as in the paper, lets nodes borrow nothing.
    - `cross_fit` (default ``CrossFit()``): None gives the paper's in-sample statistics.
    - `feature_noise` (default ``FeatureNoise()``): None gives all features the same noise, as in the paper.
    - `noise_covariance` (default ``NoiseCovariance()``): None makes the noise of different features independent, as in
      the paper.
    - `shared_span` (default ``SharedSpan()``): None lets nodes learn their directions in R^D, as in the paper.
    - `missing_rows` (default ``MissingRows()``): for rows with missing features.
    """

    max_rank: int | None = None
    depth: int | None = None
    num_trees: int = 8
    num_neighbors: int | None = None
    tree_rows: int | None = None
    min_cell_size: int | None = None
    refined_cuts: bool = True
    num_candidates: int | None = None
    parent_rows: float | None = 3.0
    borrowed_rows: float | None = 5.0
    cross_fit: CrossFit | None = CrossFit()
    feature_noise: FeatureNoise | None = FeatureNoise()
    noise_covariance: NoiseCovariance | None = NoiseCovariance()
    shared_span: SharedSpan | None = SharedSpan()
    missing_rows: MissingRows = MissingRows()

    def __post_init__(self) -> None:
        _convert(self, "num_trees", check_integer, 1)
        for name, minimum in (
            ("max_rank", 1),
            ("depth", 0),
            ("num_neighbors", 1),
            ("tree_rows", 2),
            ("min_cell_size", 2),
            ("num_candidates", 1),
        ):
            _convert_if_given(self, name, check_integer, minimum)
        if self.depth is not None and self.depth > MOST_DEPTH:
            raise ValueError(
                f"depth: expected an integer of at most {MOST_DEPTH}, as a tree has room for 2**depth leaves, got"
                f" {self.depth}"
            )
        for name in ("parent_rows", "borrowed_rows"):
            _convert_if_given(self, name, check_number, above=0.0)
        _convert(self, "refined_cuts", check_instance, bool)
        check_instance(self.cross_fit, "cross_fit", (CrossFit, None))
        check_instance(self.feature_noise, "feature_noise", (FeatureNoise, None))
        check_instance(self.noise_covariance, "noise_covariance", (NoiseCovariance, None))
        check_instance(self.shared_span, "shared_span", (SharedSpan, None))
        check_instance(self.missing_rows, "missing_rows", MissingRows)

    @classmethod
    def published(cls, max_rank: int = 20, depth: int | None = None) -> "DictionarySettings":
        """Stage one as in the paper: one tree, in-sample statistics, isotropic noise, no shared span.

        Cells have at least 20 rows: with in-sample statistics smaller cells over-fit even more, which would make the
        published form look worse than it is.
        """
        return cls(
            max_rank=max_rank,
            depth=depth,
            num_trees=1,
            min_cell_size=20,
            refined_cuts=False,
            parent_rows=None,
            borrowed_rows=None,
            cross_fit=None,
            feature_noise=None,
            noise_covariance=None,
            shared_span=None,
        )


@dataclasses.dataclass(frozen=True)
class GammaPrior:
    """A Gamma(shape, rate) prior, with mean ``shape / rate``, on a hyperparameter that is then learned."""

    shape: float = 1.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        _convert(self, "shape", check_number, above=0.0)
        _convert(self, "rate", check_number, above=0.0)


@dataclasses.dataclass(frozen=True)
class Prior:
    """Hyperparameters of the model (the paper's section 2).

    - `tau_rate` (default 1.0): a in ``tau ~ Exp(a)`` on [1, inf); the smaller it is, the harder later directions are
      shrunk. The paper's 0.05 shrinks by a factor of about twenty per direction, even in cells of few rows (`python -m
      benchmarks.stage_one` compares values). Far above 1, nodes of few rows take rows from other nodes and give wrong
      intrinsic dimensions.
    - `noise_rows` (default 3.0): the prior of each scale's noise is worth this many rows with the noise that stage one
      found typical of the scale, so that a scale without rows gets noise like the others. At least 1 if `noise_shape`
      is 0. At the root one feature of each of these rows has noise of unknown size; at other scales this holds for the
      share of training rows that miss features. None, as in the paper: no such rows, and `noise_shape` and `noise_rate`
      are the whole prior.
    - `noise_shape` (default 0.0): added to that prior's shape, as by ``1/sigma2 ~ Gamma(noise_shape, noise_rate)``,
      with sigma in units of the data's root-mean-square deviation (that of most rows where a few are very far off);
      above 0 if `noise_rows` is None. The paper's 0.5 and 0.5 add the square of one such deviation to the noise's sum
      of squares. That is much where all noise of a scale's rows together is little, as in tables whose columns nearly
      follow from others.
    - `noise_rate` (default 0.0): added to its rate; above 0 if `noise_rows` is None.
    - `stop_concentration` (default 1.0): a_S in ``S ~ Beta(1, a_S)``, large for deep trees; a number, or a
      :class:`GammaPrior` to learn it.
    - `right_concentration` (default 1.0): b_R in ``R ~ Beta(b_R, b_R)``.
    """

    tau_rate: float = 1.0
    noise_shape: float = 0.0
    noise_rate: float = 0.0
    noise_rows: float | None = 3.0
    stop_concentration: float | GammaPrior = 1.0
    right_concentration: float = 1.0

    def __post_init__(self) -> None:
        _convert(self, "tau_rate", check_number, above=0.0)
        _convert(self, "right_concentration", check_number, above=0.0)
        if not isinstance(self.stop_concentration, GammaPrior):
            _convert(self, "stop_concentration", check_number, above=0.0)
        for name in ("noise_shape", "noise_rate"):
            value = _convert(self, name, check_number, above=-np.inf)
            if value < 0.0:
                raise ValueError(f"{name}: expected a number of at least 0, got {value}")
            if value == 0.0 and self.noise_rows is None:
                where = "where noise_rows is None, as in Prior.published()"
                raise ValueError(f"{name}: expected a number above 0 {where}, got 0")
        if self.noise_rows is not None:
            _convert(self, "noise_rows", check_number, above=0.0)
            if self.noise_shape == 0.0 and self.noise_rows < 1.0:
                raise ValueError(f"noise_rows: expected at least 1 where noise_shape is 0, got {self.noise_rows}")

    @classmethod
    def published(cls) -> "Prior":
        """The paper's hyperparameters."""
        return cls(tau_rate=0.05, noise_shape=0.5, noise_rate=0.5, noise_rows=None)


@dataclasses.dataclass(frozen=True)
class ExactShrinkage:
    """Update u and tau by steps that leave the model's posterior exactly invariant."""


@dataclasses.dataclass(frozen=True)
class PublishedShrinkage:
    """Draw u and tau by steps 3 and 4 as printed in the paper, for reproduction.

    Step 3 has shape ``delta + n/2`` where the prior implies ``delta + 1 + n/2``; step 4 drops the other tau's and the
    normaliser of the truncated gamma. These steps do not sample the model's posterior.
    """


@dataclasses.dataclass(frozen=True)
class DirectMembership:
    """Draw a row's node from its conditional over all nodes of the tree."""


@dataclasses.dataclass(frozen=True)
class SliceMembership:
    """Draw a row's node by the multiscale slice sampler of Canale & Dunson (the paper's section 2.2).

    A uniform variable below the weight of the row's scale restricts the row to scales of larger weight. The posterior
    is the same as with the direct draw. It was made for trees of unbounded depth; on a tree of given depth it saves no
    work and mixes more slowly (``python -m benchmarks.mixing``), so use it only for reproduction.
    """


@dataclasses.dataclass(frozen=True)
class RankAdaptation:
    """Removal and return of directions during warm-up (the paper's steps 6 and 7).

    At sweep t, with probability ``exp(intercept + slope * t)``, every node adapts: directions whose variance is below
    `tolerance` times the node's largest are removed; at a node where none is, one removed direction returns.
    """

    tolerance: float = 1e-4
    intercept: float = -1.0
    slope: float = -0.005

    def __post_init__(self) -> None:
        _convert(self, "tolerance", check_number, above=0.0, below=1.0)
        for name in ("intercept", "slope"):
            _convert(self, name, check_number, above=-np.inf)
            if not getattr(self, name) <= 0.0:
                raise ValueError(f"{name}: expected a number of at most 0, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """How stage two samples, with ``num_warmup + num_samples * thinning`` sweeps per chain.

    - `num_warmup` (default 100): sweeps per chain before draws are kept; ranks adapt in them.
    - `num_samples` (default 100): draws kept per chain.
    - `num_chains` (default 1): chains per tree.
    - `thinning` (default 1): sweeps per draw that is kept.
    - `shrinkage` (default ``ExactShrinkage()``): how u and tau are updated.
    - `membership` (default ``DirectMembership()``): how the nodes of the rows are drawn.
    - `adaptation` (default ``RankAdaptation()``): how ranks adapt; None keeps all directions.
    - `segment_length` (default 50): sweeps per compiled call. After each, draws move to the host, progress is shown,
      and the checkpoint is written. The last call is as long as the others: sweeps after the last draw are dropped.
    """

    num_warmup: int = 100
    num_samples: int = 100
    num_chains: int = 1
    thinning: int = 1
    shrinkage: ExactShrinkage | PublishedShrinkage = ExactShrinkage()
    membership: DirectMembership | SliceMembership = DirectMembership()
    adaptation: RankAdaptation | None = RankAdaptation()
    segment_length: int = 50

    def __post_init__(self) -> None:
        _convert(self, "num_warmup", check_integer, 0)
        for name in ("num_samples", "num_chains", "thinning", "segment_length"):
            _convert(self, name, check_integer, 1)
        check_instance(self.shrinkage, "shrinkage", (ExactShrinkage, PublishedShrinkage))
        check_instance(self.membership, "membership", (DirectMembership, SliceMembership))
        check_instance(self.adaptation, "adaptation", (RankAdaptation, None))

    @classmethod
    def published(cls) -> "SamplerSettings":
        """The paper's steps and number of sweeps.

        The default has fewer sweeps, as predictions are averaged over trees (`python -m benchmarks.run_length` compares
        lengths).
        """
        return cls(num_warmup=500, num_samples=500, shrinkage=PublishedShrinkage())

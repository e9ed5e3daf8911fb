"""Options of a fit as small frozen classes, validated when they are made."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from geode_jax._checks import check_instance, check_integer, check_number

Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True)
class CrossFit:
    """Statistics of a row come from a dictionary that never saw the row.

    Rows get one fold each, the same for every node; the dictionary is learned once more without each fold.
    """

    num_folds: int = 5

    def __post_init__(self) -> None:
        check_integer(self.num_folds, "num_folds", 2)


@dataclasses.dataclass(frozen=True)
class FeatureNoise:
    """A noise scale per feature: the noise covariance is ``sigma2 * diag(scale**2)`` instead of ``sigma2 * I``.

    The scales are root-mean-square cross-fitted residuals off the local subspaces, iterated `num_rounds` times, at
    least `floor` times their mean (which is what a constant or nearly constant feature gets), with geometric mean 1,
    and drawn together as far as their differences are the errors of their estimates. Where features are in different
    units, and held-out rows tell so, each is first divided by its own deviation.
    """

    num_rounds: int = 3
    num_folds: int = 5
    floor: float = 0.05

    def __post_init__(self) -> None:
        check_integer(self.num_rounds, "num_rounds", 1)
        check_integer(self.num_folds, "num_folds", 2)
        check_number(self.floor, "floor", above=0.0, below=1.0)


@dataclasses.dataclass(frozen=True)
class SharedSpan:
    """Centres and directions of all nodes lie in the span of the leading directions of the whole data.

    What is outside is noise at every node, so that nodes learn `rank` coordinates instead of D. None chooses the rank
    by cross-fitted likelihood, no span being one of the choices; it needs `cross_fit`, without which there is no span.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_integer(self.rank, "rank", 1)


@dataclasses.dataclass(frozen=True)
class NoiseCovariance:
    """The noise has a full covariance, ``sigma2 * R R``, the same for all nodes but for their sigma2.

    R has the principal axes of the whole data, and eigenvalues by what the nodes leave over along them, both learned
    without the rows that they are judged by (`learning/noise_covariance.py`). It is taken where cross-fitted likelihood
    says that it helps: where features correlate beyond a few directions, as neighbouring pixels do. It is not looked
    for in more than `max_features` features, as its work grows with the cube of their number; in more than twice as
    many features as rows; where training rows have missing features; without `cross_fit`; and in classes.
    """

    max_features: int = 1000

    def __post_init__(self) -> None:
        check_integer(self.max_features, "max_features", 1)


@dataclasses.dataclass(frozen=True)
class MissingRows:
    """What a fit does about rows with missing features.

    `num_candidates`: nodes that such a row may belong to; None is 6. `num_groups`: a sweep draws one group of these
    rows, so that each is drawn in every `num_groups`-th sweep; None takes 1 to 4 by their cost.

    The sampler keeps two (d, d) matrices per tree, row and candidate, ``8 F n_m M d**2`` bytes in float32 (with few
    patterns of missing features: per tree, pattern, fold and node).
    """

    num_candidates: int | None = None
    num_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_candidates", "num_groups"):
            if getattr(self, name) is not None:
                check_integer(getattr(self, name), name, 1)


def _renamed(old: str, new: str) -> Callable[[type[Kind]], type[Kind]]:
    """Let a settings class take and give the field `new` by its `old` name too, with a DeprecationWarning."""

    def warn(name: str) -> None:
        warnings.warn(f"{name}.{old} is called {new} now", DeprecationWarning, stacklevel=3)

    def decorate(kind: type[Kind]) -> type[Kind]:
        original = kind.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if old in kwargs:
                warn(kind.__name__)
                kwargs[new] = kwargs.pop(old)
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
    """How stage one learns the trees and their dictionaries. None means: chosen from the data's shape.

    `max_rank`: directions per node; None: as many as held-out rows tell of and half as many again, up to 100. `depth`:
    scales below the root. `num_trees`: trees that are averaged. `num_neighbors`: neighbours per row in the graph.
    `tree_rows`: rows that a tree's graph and cuts are learned from, other ones for every tree; the rest go to the
    nearer centre from the root down. `min_cell_size`: rows below which a cell is not split off. `num_candidates`: nodes
    of each tree that a row may belong to, the sampler's memory and time being in proportion; the posterior's
    `lost_mass` tells what that leaves out. `parent_rows`: how many rows the parent's covariance counts for in a cell's;
    None as in the paper, where cells share nothing. `cross_fit`: None gives the paper's in-sample statistics.
    `feature_noise`: None gives all features the same noise, as in the paper. `noise_covariance`: None lets the noise
    of different features be independent, as in the paper. `shared_span`: None lets nodes learn their directions in R^D,
    as in the paper. `missing_rows`: for rows with missing features.
    """

    max_rank: int | None = None
    depth: int | None = None
    num_trees: int = 8
    num_neighbors: int | None = None
    tree_rows: int | None = None
    min_cell_size: int | None = None
    num_candidates: int | None = None
    parent_rows: float | None = 3.0
    cross_fit: CrossFit | None = CrossFit()
    feature_noise: FeatureNoise | None = FeatureNoise()
    noise_covariance: NoiseCovariance | None = NoiseCovariance()
    shared_span: SharedSpan | None = SharedSpan()
    missing_rows: MissingRows = MissingRows()

    def __post_init__(self) -> None:
        check_integer(self.num_trees, "num_trees", 1)
        for name, minimum in (
            ("max_rank", 1),
            ("depth", 0),
            ("num_neighbors", 1),
            ("tree_rows", 2),
            ("min_cell_size", 2),
            ("num_candidates", 1),
        ):
            value = getattr(self, name)
            if value is not None:
                check_integer(value, name, minimum)
        if self.parent_rows is not None:
            check_number(self.parent_rows, "parent_rows", above=0.0)
        check_instance(self.cross_fit, "cross_fit", (CrossFit, None))
        check_instance(self.feature_noise, "feature_noise", (FeatureNoise, None))
        check_instance(self.noise_covariance, "noise_covariance", (NoiseCovariance, None))
        check_instance(self.shared_span, "shared_span", (SharedSpan, None))
        check_instance(self.missing_rows, "missing_rows", MissingRows)

    @classmethod
    def published(cls, max_rank: int = 20, depth: int | None = None) -> "DictionarySettings":
        """Stage one as in the paper: one tree, in-sample statistics, isotropic noise, no shared span.

        Cells have at least 20 rows: in sample, smaller ones over-fit more, which would make it worse than it is.
        """
        return cls(
            max_rank=max_rank,
            depth=depth,
            num_trees=1,
            min_cell_size=20,
            parent_rows=None,
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
        check_number(self.shape, "shape", above=0.0)
        check_number(self.rate, "rate", above=0.0)


@dataclasses.dataclass(frozen=True)
class Prior:
    """Hyperparameters of the model (the paper's section 2).

    `tau_rate`: a in ``tau ~ Exp(a)`` on [1, inf): the smaller, the harder later directions are shrunk. The paper's 0.05
    shrinks by twenty per direction, also where a cell has few rows (`python -m benchmarks.stage_one` compares values);
    far above 1, nodes of few rows hold rows of others and say wrong intrinsic dimensions. `noise_shape`, `noise_rate`:
    ``1/sigma2 ~ Gamma`` in units of the data's root-mean-square deviation. `stop_concentration`: a_S in ``S ~ Beta(1,
    a_S)``, large for deep trees; a number, or a :class:`GammaPrior` to learn it. `right_concentration`: b_R in ``R ~
    Beta(b_R, b_R)``.
    """

    tau_rate: float = 1.0
    noise_shape: float = 0.5
    noise_rate: float = 0.5
    stop_concentration: float | GammaPrior = 1.0
    right_concentration: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "stop_concentration" and isinstance(value, GammaPrior):
                continue
            check_number(value, field.name, above=0.0)

    @classmethod
    def published(cls) -> "Prior":
        """The paper's hyperparameters."""
        return cls(tau_rate=0.05)


@dataclasses.dataclass(frozen=True)
class ExactShrinkage:
    """Move u and tau by steps that leave the stated joint exactly as it is."""


@dataclasses.dataclass(frozen=True)
class PublishedShrinkage:
    """Draw u and tau by steps 3 and 4 as printed in the paper, for reproduction.

    Step 3 has shape ``delta + n/2`` where the prior implies ``delta + 1 + n/2``; step 4 drops the other tau's and the
    normaliser of the truncated gamma. The result is not a sampler of the stated joint.
    """


@dataclasses.dataclass(frozen=True)
class DirectMembership:
    """Draw a row's node from its conditional over all nodes of the tree."""


@dataclasses.dataclass(frozen=True)
class SliceMembership:
    """Draw a row's node by the multiscale slice sampler of Canale & Dunson (the paper's section 2.2).

    A uniform variable below the weight of the row's scale leaves only scales of larger weight open to the row. It has
    the same posterior as the direct draw. It was made for trees of unbounded depth; on a tree of given depth it saves
    no work and mixes more slowly (``python -m benchmarks.mixing``), so its use is reproduction.
    """


@dataclasses.dataclass(frozen=True)
class RankAdaptation:
    """Removal and return of directions during warm-up (the paper's steps 6 and 7).

    At sweep t, with probability ``exp(intercept + slope * t)``, every node adapts: directions whose variance is below
    `tolerance` times the node's largest are removed; where none is, one removed direction returns.
    """

    tolerance: float = 1e-4
    intercept: float = -1.0
    slope: float = -0.005

    def __post_init__(self) -> None:
        check_number(self.tolerance, "tolerance", above=0.0, below=1.0)
        for name in ("intercept", "slope"):
            if not getattr(self, name) <= 0.0:
                raise ValueError(f"{name}: expected a number of at most 0, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """How stage two draws. Sweeps per chain: ``num_warmup + num_samples * thinning``.

    `segment_length`: sweeps between two visits to the host, where draws leave the device and progress is shown.
    """

    num_warmup: int = 500
    num_samples: int = 500
    num_chains: int = 1
    thinning: int = 1
    shrinkage: ExactShrinkage | PublishedShrinkage = ExactShrinkage()
    membership: DirectMembership | SliceMembership = DirectMembership()
    adaptation: RankAdaptation | None = RankAdaptation()
    segment_length: int = 50

    def __post_init__(self) -> None:
        check_integer(self.num_warmup, "num_warmup", 0)
        for name in ("num_samples", "num_chains", "thinning", "segment_length"):
            check_integer(getattr(self, name), name, 1)
        check_instance(self.shrinkage, "shrinkage", (ExactShrinkage, PublishedShrinkage))
        check_instance(self.membership, "membership", (DirectMembership, SliceMembership))
        check_instance(self.adaptation, "adaptation", (RankAdaptation, None))

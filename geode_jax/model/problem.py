"""What stays fixed while a posterior is sampled."""

import equinox as eqx

from geode_jax._typing import Array, Count
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.candidate_statistics import AnyStatistics
from geode_jax.model.partial_statistics import PartialRows
from geode_jax.model.tree import Tree
from geode_jax.settings import DirectMembership, ExactShrinkage, Prior, PublishedShrinkage, SliceMembership


class Problem(eqx.Module):
    """What stays fixed during sampling: the tree, the rows' statistics, and the model's constants.

    `statistics` are those of the complete rows, `partial` those of rows with missing features (None without such rows).
    `borrowed`: what the prior takes from stage one.
    """

    tree: Tree
    statistics: AnyStatistics
    partial: PartialRows | None
    borrowed: Borrowed
    is_available: Array
    num_features: Count
    prior: Prior = eqx.field(static=True)
    shrinkage: ExactShrinkage | PublishedShrinkage = eqx.field(static=True)
    membership: DirectMembership | SliceMembership = eqx.field(static=True)

"""What is stored of a chain: its draws, and tallies of the rank adaptation."""

import equinox as eqx

from geode_jax._typing import Array, Bool, Float, Int


class Draw(eqx.Module):
    """What is stored of one sweep; nothing in it has size n."""

    neg_log_u: Float[Array, "*batch K d"]
    tau: Float[Array, "*batch K d"]
    log_sigma2: Float[Array, "*batch S"]
    log_weights: Float[Array, "*batch K"]
    log_stop_concentration: Float[Array, "*batch"]
    count: Int[Array, "*batch K"]
    is_active: Bool[Array, "*batch K d"]
    dimension: Int[Array, "*batch K"]
    log_joint: Float[Array, "*batch"]


class Adaptation(eqx.Module):
    """Tallies over the adaptation steps of a chain, for the paper's inclusion probabilities.

    `included`: sum, over the steps at which direction m of node k passed the removal test, of the node's share of rows.
    `steps`: the number of adaptation steps.
    """

    included: Float[Array, "*batch K d"]
    steps: Float[Array, "*batch"]

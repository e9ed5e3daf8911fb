"""What is kept of a chain."""

import equinox as eqx

from geode_jax._typing import Array, Bool, Float, Int


class Draw(eqx.Module):
    """What is kept of one sweep; never anything of size n."""

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

    `included`: sum over steps of the share of rows that are at node k while its direction m passes the removal test.
    `steps`: how many there were.
    """

    included: Float[Array, "*batch K d"]
    steps: Float[Array, "*batch"]

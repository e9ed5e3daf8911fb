"""What all fits do around their two stages."""

import dataclasses
from collections.abc import Callable

from geode_jax._files.checkpoint import Checkpoint
from geode_jax.forest.forest import Forest
from geode_jax.gibbs.run import Samples
from geode_jax.gibbs.sharding import CHAINS, ROWS, TREES
from geode_jax.model.statistics import ROW_BLOCKS
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.held_out import lost_mass
from geode_jax.settings import Prior, SamplerSettings


def mesh_limits(num_trees: int, settings: SamplerSettings) -> dict[str, int]:
    """What the size of each axis of a mesh must divide."""
    return {TREES: num_trees, CHAINS: settings.num_chains, ROWS: ROW_BLOCKS}


def kept_forest(kept: Checkpoint | None, grow: Callable[[], Forest]) -> Forest:
    """The forest of a checkpoint, or a new one, which it then keeps."""
    found = kept and kept.read("forest")
    if found:
        return Forest.from_archive(*found)
    forest = grow()
    if kept is not None:
        kept.write("forest", *forest.to_archive())
    return forest


def posterior_of(forest: Forest, samples: Samples, prior: Prior, settings: SamplerSettings) -> Posterior:
    """What :func:`fit` returns, from its two stages."""
    posterior = Posterior(
        dictionary=forest.dictionary,
        draws=samples.draws,
        adaptation=samples.adaptation,
        shift=forest.shift,
        scale=forest.scale,
        dictionary_settings=forest.dictionary_settings,
        prior=prior,
        sampler_settings=settings,
        noise_root=forest.noise_root,
    )
    return dataclasses.replace(posterior, lost_mass=lost_mass(forest, posterior))

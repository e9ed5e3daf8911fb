"""``python -m geode_jax``: the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from geode_jax.demo import digits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m geode_jax", description="Bayesian multiscale density estimation (GEODE)."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="fit scikit-learn's digits and compare with a Gaussian mixture and probabilistic PCA (about a minute)",
    )
    demo.add_argument("--output", type=Path, default=Path("geode_demo.png"), help="where to save the picture")
    demo.add_argument("--seed", type=int, default=0, help="seed of the split, the mask and the sampler")
    options = parser.parse_args(arguments)
    digits.run(options.output, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

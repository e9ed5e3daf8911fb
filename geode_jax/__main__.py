"""``python -m geode_jax``: the command line."""

from geode_jax.cli.commands import run

if __name__ == "__main__":
    raise SystemExit(run())

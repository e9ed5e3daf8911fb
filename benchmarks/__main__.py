"""python -m benchmarks list | run NAME [--quick] [...]: every experiment by its name.

What a full run takes goes to results/suite.json; a run that goes on where another ended is not timed.
"""

import argparse
import importlib
import pkgutil
import sys
import time

import benchmarks
from benchmarks.common import earlier_rows, write_result

NOT_EXPERIMENTS = {"__main__", "common", "figures", "flow", "overview", "readme", "rivals", "tables"}


def experiments() -> list[str]:
    """Names of all experiments."""
    return sorted(
        module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_EXPERIMENTS
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Experiments and their results.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of the experiments, and what each asks")
    run = commands.add_parser("run", help="run an experiment, or all; other arguments are the experiment's own")
    run.add_argument("name", choices=[*experiments(), "all"])
    run.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "list":
        for name in experiments():
            text = importlib.import_module(f"benchmarks.{name}").__doc__
            print(f"{name:<18}{text.splitlines()[0]}")
        return
    for name in experiments() if options.name == "all" else [options.name]:
        start = time.perf_counter()
        experiment = importlib.import_module(f"benchmarks.{name}")
        experiment.main([*rest, *(["--quick"] if options.quick else [])])
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
        goes_on = hasattr(experiment, "earlier_rows")  # where its last run ended, unless it starts afresh
        if not options.quick and rest == (["--fresh"] if goes_on else []):
            others = [row for row in earlier_rows("suite", {}) if row["experiment"] != name]
            row = {"experiment": name, "seconds": round(seconds), "date": time.strftime("%Y-%m-%d")}
            write_result("suite", {}, sorted([*others, row], key=lambda row: row["experiment"]))


if __name__ == "__main__":
    main()

"""Write the results section of README.md from the JSON files in benchmarks/results.

python -m benchmarks.readme [--check]
"""

import argparse
import json
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT

START, END = "<!-- results: python -m benchmarks.readme -->", "<!-- end of results -->"


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _mean(rows: list[dict[str, Any]], method: str, key: str) -> float:
    return float(np.mean([row[key] for row in rows if row["method"] == method]))


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return f"{machine['cores']} CPU cores, Python {machine['python']}, JAX {versions['jax']}, {record['date']}"


def render() -> str:
    """The section between the two markers."""
    frey, digits = _load("frey_inpainting"), _load("digits_density")
    lines = [
        START,
        "",
        "**Frey faces** (the paper's section 4.1; D = 560, 1000 training frames, half of the pixels of 965 others"
        f" hidden; mean of seeds {frey['settings']['seeds']}), `{frey['command']}`:",
        "",
        "| | mean abs. error (0..255) | coverage of 95% | mean width | nats per pixel | fit | fill in 965 |",
        "|---|---|---|---|---|---|---|",
        f"| the paper | {frey['settings']['paper_mae']} | | | | | |",
    ]
    labels = {"published": "published form, here (d = 20, depth 4)", "default": "**default**"}
    for method, label in labels.items():
        keys = ("mae", "coverage95", "width95", "log_density_per_pixel", "fit_seconds", "impute_seconds")
        values = {key: _mean(frey["rows"], method, key) for key in keys}
        cells = (
            f"{values['mae']:.2f}",
            f"{values['coverage95']:.1%}",
            f"{values['width95']:.1f}",
            f"{values['log_density_per_pixel']:.2f}",
            f"{values['fit_seconds']:.0f} s",
            f"{values['impute_seconds']:.0f} s",
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += [
        "",
        f"**Digits** (D = 64, 1437 training and 360 test images, five splits), `{digits['command']}`:",
        "",
        "| | held-out nats per image | seconds to fit |",
        "|---|---|---|",
    ]
    for method in dict.fromkeys(row["method"] for row in digits["rows"]):
        bold = "**" if method.startswith("default") else ""
        seconds = float(np.median([row["seconds"] for row in digits["rows"] if row["method"] == method]))
        lines.append(f"| {bold}{method}{bold} | {_mean(digits['rows'], method, 'nats'):.1f} | {seconds:.1f} |")
    lines += ["", f"Measured on {_machine(frey)}; times include compilation.", "", END]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the README is up to date")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    text = path.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    updated = before + render() + after
    if options.check:
        return int(updated != text)
    path.write_text(updated)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

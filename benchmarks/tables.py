"""Committed results as Markdown: what every experiment's own table is made with."""

import json
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.common import RESULTS


def load(name: str) -> dict[str, Any]:
    """The record that an experiment's last run has written; its command as `python -m benchmarks run NAME`."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    record["command"] = record["command"].replace("benchmarks.", "benchmarks run ")
    return record


def mean_of(rows: list[dict[str, Any]], method: str, key: str) -> float:
    """Mean of a number over the rows of a method that have it."""
    return float(np.mean([row[key] for row in rows if row["method"] == method and key in row]))


def finished(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The rows of methods that have `number` of them: a run that is not finished has fewer, and other splits."""
    counts = Counter(row["method"] for row in rows)
    return [row for row in rows if counts[row["method"]] >= number]


def machine(record: dict[str, Any]) -> str:
    """What a record was measured on, and when."""
    where, versions = record["machine"], record["versions"]
    return f"{where['cores']} CPU cores, Python {where['python']}, JAX {versions['jax']}, {record['date']}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]

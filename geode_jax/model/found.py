"""What stage one found: the sizes of a forest, and why they were chosen."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Decision:
    """One choice of stage one.

    `about`: what was to be chosen. `taken`: what was chosen. `why`: the reason, in words. `gain`: by how much the
    alternative that was tried raises the log density of held-out rows, in nats per row; `error`: its standard error.
    Both are None where nothing was tried.
    """

    about: str
    taken: str
    why: str
    gain: float | None = None
    error: float | None = None

    def check(self) -> None:
        """Raise ValueError if a field is of another type than it must be."""
        words, numbers = (self.about, self.taken, self.why), (self.gain, self.error)
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f"a decision's about, taken and why are {words}, not strings")
        if not all(number is None or type(number) in (int, float) for number in numbers):
            raise ValueError(f"a decision's gain and error are {numbers}, not numbers or None")

    def __str__(self) -> str:
        if self.gain is None or self.error is None:
            return f"{self.about}: {self.taken} ({self.why})"
        return f"{self.about}: {self.taken} ({self.why}: {self.gain:+.3g} +- {self.error:.2g} nats per held-out row)"


@dataclasses.dataclass(frozen=True)
class Found:
    """What stage one found where :class:`geode_jax.DictionarySettings` left it open.

    `rank`: directions per node. `span_rank`: directions of the span shared by all nodes; None without one.
    `num_candidates`: nodes of a tree that a complete row may belong to. `decisions`: what was chosen, and why; empty
    for files of the first format. `rank_limit`: the most directions that could have been found; None in older files.
    """

    rank: int
    span_rank: int | None
    num_candidates: int
    decisions: tuple[Decision, ...] = ()
    rank_limit: int | None = None

    def to_header(self) -> dict[str, Any]:
        """As a dictionary for the header of a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Found":
        """The inverse of :meth:`to_header`."""
        decisions = tuple(Decision(**each) for each in header["decisions"])
        sizes = header["rank"], header["span_rank"], header["num_candidates"]
        limit = header.get("rank_limit")
        for decision in decisions:
            decision.check()
        known = [sizes[0], sizes[2], *(size for size in (sizes[1], limit) if size is not None)]
        if not all(type(size) is int and size > 0 for size in known):  # not a bool, which is an int to Python
            raise ValueError(f"rank, span_rank, num_candidates and rank_limit are {(*sizes, limit)}, not sizes")
        return cls(*sizes, decisions, limit)

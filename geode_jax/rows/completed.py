"""Rows without missing entries, where some were filled: what each dictionary may learn from.

What a row was filled with hangs on the rows that it was filled by, their noise too. So the rows that a fold's
dictionary learns from are filled by dictionaries that left that fold out; or what it says of the fold's rows would be
too good to be true, and choices by it would take noise for directions.
"""

from typing import NamedTuple

import numpy as np

from geode_jax.rows.folds import LeftOut
from geode_jax.rows.view import Rows, divide


class Completed(NamedTuple):
    """Rows without missing entries: `x` (n, D), and where there were any, as filled without knowing of each fold."""

    x: Rows
    without: list[np.ndarray] | None

    def divided(self, divisors: np.ndarray) -> "Completed":
        """All of them divided, where they lie if they are arrays."""
        for rows in self.without or []:
            divide(rows, divisors)
        return self._replace(x=divide(self.x, divisors))

    def each(self, left_out: LeftOut) -> list[tuple[Rows, LeftOut]]:
        """Rows, and the groups of dictionaries that learn from them: all from the same where none were filled."""
        if self.without is None:
            return [(self.x, left_out)]
        return [(self.without[group[0]] if group else self.x, [group]) for group in left_out]

    def without_fold(self, fold: int) -> Rows:
        """Rows (n, D) of which those outside the fold may be learned from."""
        return self.x if self.without is None else self.without[fold]

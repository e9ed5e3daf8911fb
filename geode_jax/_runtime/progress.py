"""Progress of a call: the share that is done, the current step in words, and the bar that shows both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tqdm import tqdm

# Called with the share that is done, 0 to 1, and the current step in words.
ShowProgress: TypeAlias = Callable[[float, str], None]

_FORMAT = "{desc:<28}|{bar:30}| {percentage:3.0f}% [{elapsed}]"


@contextmanager
def progress_bar(is_shown: bool) -> Iterator[ShowProgress]:
    """Yield a function that moves a bar from 0 to 1 on standard error, or that does nothing."""
    with tqdm(total=1.0, disable=not is_shown, bar_format=_FORMAT) as bar:

        def show(share: float, text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update(share - bar.n)

        yield show


def part_of(show: ShowProgress, first: float, last: float, prefix: str = "") -> ShowProgress:
    """A `ShowProgress` for one part of the work, mapped to the range `first` to `last` of the whole bar."""
    return lambda share, text: show(first + (last - first) * share, prefix + text)

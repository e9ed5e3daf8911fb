"""Progress bars."""

from typing import Any

from tqdm import tqdm

BAR_FORMAT = "{desc:<28}|{bar:30}| {percentage:3.0f}% [{elapsed}]"


def progress_bar(progress: bool) -> Any:
    """A bar from 0 to 1 on standard error, or nothing."""
    return tqdm(total=1.0, disable=not progress, bar_format=BAR_FORMAT)


def move_bar(bar: Any, first: float, last: float, share: float, text: str) -> None:
    """Show a stage that reaches from `first` to `last` on the bar, and of which `share` is done."""
    bar.set_description_str(text, refresh=False)
    bar.update(first + (last - first) * share - bar.n)

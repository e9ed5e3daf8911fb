"""Files that appear whole or not at all, whoever else writes to the same place and whenever the power fails."""

import contextlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

# A part of a file's name that other hosts, and containers, which count processes of their own, do not have.
_HOST = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:40]


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to instead of `path`; at the end its content takes the place of what `path` held.

    If the context ends with an error, `path` is left as it was. A symbolic link stays one, and what it points to is
    replaced. Permissions of an existing file are kept. Raises OSError if `path` exists and is no regular file, or if
    its folder does not exist.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"expected a path in a folder that exists, got {os.fspath(path)!s}")
    mode = mode_of_replaced(path)
    _remove_orphans(target)
    # several processes may write to the same place, and a user's own file may have any plain name
    partial = target.with_name(f"{target.name}.{_HOST}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield partial
        _flush(partial, os.O_RDWR)  # Windows flushes what may be written only
        if mode is not None:
            os.chmod(partial, stat.S_IMODE(mode))
        os.replace(partial, target)
        with contextlib.suppress(OSError):  # Windows, and file systems that flush no folders
            _flush(target.parent, os.O_RDONLY)
    finally:
        partial.unlink(missing_ok=True)


def mode_of_replaced(path: str | os.PathLike[str]) -> int | None:
    """Mode of the file that a new one would replace, None without one. Raises OSError if it is no regular file."""
    if not os.path.exists(path):
        return None
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"expected a regular file to replace, or none, got {os.fspath(path)!s}")
    return mode


def _flush(path: Path, access: int) -> None:
    """Have the system write a file, or the entries of a folder, to the disk."""
    number = os.open(path, access)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove_orphans(target: Path) -> None:
    """Remove what processes of this host that no longer run began to write for `target`."""
    pattern = re.compile(re.escape(f"{target.name}.{_HOST}") + r"\.(\d+)-[0-9a-f]{8}\.part")
    for path in target.parent.glob("*.part"):
        found = pattern.fullmatch(path.name)
        if found and not _is_running(int(found.group(1))):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Whether a process runs on this host; yes where that cannot be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs as another user
        return True
    return True

"""Files appear whole or not at all, keep what their owner set, and never take the place of anything but a file."""

import errno
import os
import stat
import sys
import zipfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from geode_jax._files.archive import write_archive
from geode_jax._files.whole import _HOST, written_whole
from geode_jax.cli.tables import TableError, new_table

POSIX = pytest.mark.skipif(os.name != "posix", reason="links and permissions as on POSIX systems")


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail():
        with written_whole(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["x.txt"]


def test_two_writers_never_mix(tmp_path):
    """The file is that of the writer who ended last; a user's own file of a similar name is left alone."""
    path = tmp_path / "x.csv"
    (tmp_path / "x.csv.part").write_text("the user's own")
    with new_table(path, 2, ["a"]) as first:
        first(np.zeros((1, 1)))
        with new_table(path, 2, ["b"]) as second:
            second(np.ones((2, 1)))
        first(np.zeros((1, 1)))
    assert path.read_text().split() == ["a", "0.0", "0.0"]
    assert (tmp_path / "x.csv.part").read_text() == "the user's own"
    assert len(list(tmp_path.iterdir())) == 2


@POSIX
def test_links_and_permissions_are_kept(tmp_path):
    target, link = tmp_path / "model.npz", tmp_path / "link.npz"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_archive(link, {"format": "x"}, {"a": np.zeros(2)})
    assert link.is_symlink()
    assert np.load(target)["a"].size == 2
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_flushed(tmp_path):
    """As on some network file systems; a file that cannot is an error."""
    flush, is_file = os.fsync, []

    def only(of_folders, number):
        is_file.append(stat.S_ISREG(os.fstat(number).st_mode))
        if is_file[-1] != of_folders:
            raise OSError(errno.EINVAL, "invalid")
        flush(number)

    with mock.patch.object(os, "fsync", partial(only, True)):
        write_archive(tmp_path / "x.npz", {}, {"a": np.zeros(2)})
    assert is_file == [True, False]
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        assert file.namelist() == ["header.npy", "a.npy"]
    with mock.patch.object(os, "fsync", partial(only, False)), pytest.raises(OSError, match="invalid"):
        write_archive(tmp_path / "y.npz", {}, {})
    assert not (tmp_path / "y.npz").exists()


def test_arrays_of_objects_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle=False"):
        write_archive(tmp_path / "x.npz", {}, {"a": np.array([{}])})
    assert not list(tmp_path.iterdir())


@POSIX
def test_what_is_no_regular_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    for path in (tmp_path / "pipe.npz", "/dev/null", tmp_path):
        with pytest.raises(OSError, match="expected a regular file to replace, or none"):
            write_archive(path, {}, {})
    with pytest.raises(TableError, match="expected a regular file"), new_table(tmp_path / "pipe.npz", 1, ["a"]):
        pass
    assert stat.S_ISFIFO((tmp_path / "pipe.npz").stat().st_mode)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a number that no process has")
def test_what_dead_processes_left_is_removed(tmp_path):
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    for process in (dead, os.getpid()):
        for host in (_HOST, "another"):
            (tmp_path / f"x.npz.{host}.{process}-0123abcd.part").write_bytes(b"half")
    write_archive(tmp_path / "x.npz", {}, {})
    kept = {f"x.npz.{place}-0123abcd.part" for place in (f"{_HOST}.{os.getpid()}", f"another.{os.getpid()}")}
    kept.add(f"x.npz.another.{dead}-0123abcd.part")  # it may run there
    assert {one.name for one in tmp_path.iterdir()} == {"x.npz", *kept}


def test_a_folder_that_does_not_exist(tmp_path):
    path = tmp_path / "none" / "x"
    words = rf"expected a path in a folder that exists, got {path}$"
    with pytest.raises(FileNotFoundError, match=words), written_whole(path):
        pass

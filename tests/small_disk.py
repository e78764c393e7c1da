"""A full disk: a file system in memory that only this process and its children see (Linux, user namespaces)."""

import ctypes
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_REMOUNT = 0x20  # MS_REMOUNT
_NOT_PERMITTED = 77  # exit code


def end(process: BaseProcess) -> None:
    """Wait for the end of a process. If the system did not let it mount a file system, skip the test."""
    process.join()
    if process.exitcode == _NOT_PERMITTED:
        pytest.skip("this system lets nobody mount a small file system")


def mount(path: Path, size: str) -> None:
    """Mount an empty file system of `size` at `path` until this process ends: at once, if the system allows none."""
    try:
        _mount(path, size)
    except OSError:
        os._exit(_NOT_PERMITTED)


def _mount(path: Path, size: str) -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_MOUNTS | (_NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _PRIVATE, None)
    _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={size}".encode())


def resize(path: Path, size: str) -> None:
    """Change the size of the file system."""
    _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", _REMOUNT, f"size={size}".encode())


def _call(function: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function} is not permitted")

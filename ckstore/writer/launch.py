"""Starting a writer process that runs this very ckstore, with the dependencies that this process has.

What `sys.path` is here may be the work of a launcher (PEX, Bazel, a vendored folder), which neither the environment nor
the interpreter of a child knows of; and the environment may name another ckstore. So the child is told both.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import sysconfig
from contextlib import suppress

from ckstore.errors import BackendError
from ckstore.writer import sources

MODULE = ["ckstore.writer"]
"""What is run as the writer, and its arguments."""
_BEGIN = """
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os import fsdecode
from runpy import run_module

with open(0, "rb", closefd=False) as stdin:
    home, *sys.path[:] = map(fsdecode, stdin.read().split(b"\\0"))
spec = PathFinder.find_spec("ckstore", [home])
if spec is None or spec.loader is None:
    sys.exit(f"there is no ckstore in {home} any more")
sys.modules["ckstore"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""The child's program. Its stdin holds where ckstore is and the entries of `sys.path`."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def launch(fd: int) -> subprocess.Popen[bytes]:
    """Start a writer that serves the socket `fd`. OSError when the system refuses."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise BackendError(
            "no writer process can be started: sys.executable names no Python interpreter here, as in a program that "
            "embeds or freezes one; use save, or set sys.executable to an interpreter of this version"
        )
    # Neither arguments nor environment: what they may hold is limited, and both are seen by everybody.
    told = os.memfd_create("ckstore-path", os.MFD_CLOEXEC)
    try:
        with open(told, "wb", closefd=False) as file:
            file.write(b"\0".join(map(os.fsencode, [sources.HOME, *search_path()])))
        os.lseek(told, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, *_flags(), "-c", _BEGIN, *MODULE, "--fd", str(fd)],
            pass_fds=[fd],
            stdin=told,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(told)


def refused(error: OSError) -> BackendError:
    """What to raise when the system refused to start one."""
    return BackendError(f"the writer process cannot be started: {error}", retryable=error.errno in _SHORTAGES)


def search_path() -> list[str]:
    """This process's `sys.path` for another one: absolute; the standard library first.

    A script's folder comes before it otherwise, and may hold a file that is named like a module which only the writer
    imports.
    """
    entries: list[str] = []
    found: list[object] = list(sys.path)
    for entry in found:
        if isinstance(entry, str) and "\0" not in entry:  # nothing else is searched
            with suppress(FileNotFoundError):  # a working directory that was removed has no name
                entries.append(os.path.abspath(entry))
    standard = _standard()
    return sorted(dict.fromkeys(entries), key=lambda entry: entry not in standard)


def _standard() -> set[str]:
    paths = sysconfig.get_paths()
    homes = {paths["stdlib"], paths["platstdlib"]}
    version = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    archives = {os.path.join(os.path.dirname(home), version) for home in homes}
    return homes | archives | {os.path.join(home, "lib-dynload") for home in homes}


def _flags() -> list[str]:
    """As this interpreter was started; and in any case no file in the working directory is taken for a module."""
    flags = sys.flags
    wanted = {
        "-I": flags.isolated,
        "-E": flags.ignore_environment,
        "-s": flags.no_user_site,
        "-S": flags.no_site,
        "-P": True,
    }
    return [flag for flag, is_set in wanted.items() if is_set]

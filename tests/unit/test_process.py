"""Who wrote a record, and whether that process is certainly gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ckstore import layout
from ckstore.process import Owner, _owner_of, current_owner, token_is_gone

NOBODY = 2**22 + 1
"""A pid that Linux never gives."""

TELL = """
import sys, msgspec
from ckstore.process import current_owner
print(msgspec.json.encode(current_owner()).decode(), flush=True)
sys.stdin.read()
"""


def start() -> tuple[subprocess.Popen[bytes], Owner]:
    """A process that runs until its input is closed, and its own word on who it is."""
    process = subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, msgspec.json.decode(process.stdout.readline(), type=Owner)


def changed(owner: Owner, **fields: object) -> Owner:
    return msgspec.structs.replace(owner, **fields)


def test_this_process_is_not_gone() -> None:
    owner = current_owner()
    assert owner.pid == os.getpid()
    assert owner.start > 0
    assert owner.is_gone() is False
    assert token_is_gone(owner.token) is False


def test_another_process_is_gone_once_it_has_ended_even_before_it_is_reaped() -> None:
    process, owner = start()
    assert owner.token != current_owner().token
    assert (owner.is_gone(), token_is_gone(owner.token)) == (False, False)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    assert token_is_gone(owner.token) is True
    process.communicate()
    assert (owner.is_gone(), token_is_gone(owner.token)) == (True, True)


def test_a_fork_is_another_owner() -> None:
    code = """
import os
from ckstore.process import current_owner
before = current_owner().token
child = os.fork()
if not child:
    os._exit(0 if current_owner().token != before and current_owner().pid == os.getpid() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"0\n"


def test_a_pid_used_again_is_another_process() -> None:
    owner = current_owner()
    again = changed(owner, start=owner.start + 1)
    assert token_is_gone(again.token) is True


def test_elsewhere_nothing_is_certain() -> None:
    nobody = changed(current_owner(), pid=NOBODY)
    assert nobody.is_gone() is True
    assert changed(nobody, pid_namespace="pid:[1]").is_gone() is False
    assert changed(nobody, machine="fedcba9876543210", boot="of another machine").is_gone() is False
    assert changed(nobody, machine="", boot="of another machine").is_gone() is False


@pytest.mark.skipif(not current_owner().machine, reason="this machine has no id")
def test_an_earlier_boot_of_this_machine_is_gone() -> None:
    assert changed(current_owner(), boot="an earlier one").is_gone() is True


@pytest.fixture
def anew() -> Iterator[None]:
    """Who this process is, is asked anew before and after."""
    _owner_of.cache_clear()
    yield
    _owner_of.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("uuid", ["4C4C4544-0000-2010-8020-80C04F202020\n", None])
def test_a_clone_of_this_machine_is_another_one(
    uuid: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its /etc/machine-id is ours: what tells it apart is the UUID of its hardware, else its host name."""
    (tmp_path / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr("ckstore.process.MACHINE_ID", str(tmp_path / "machine-id"))
    monkeypatch.setattr("ckstore.process.PRODUCT_UUID", str(tmp_path / "uuid"))
    if uuid is not None:
        (tmp_path / "uuid").write_text(uuid)
    ours = current_owner()
    theirs = changed(ours, boot="of the clone")
    assert theirs.is_gone() is True  # as long as nothing tells them apart
    _owner_of.cache_clear()
    if uuid is None:
        monkeypatch.setattr("os.uname", lambda: SimpleNamespace(nodename="the clone"))
    else:
        (tmp_path / "uuid").write_text(uuid.replace("4C", "5D"))
    assert current_owner().machine != ours.machine
    assert theirs.is_gone() is False


def test_a_process_that_proc_hides_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be mounted so that it shows no processes of other users (hidepid)."""
    process, owner = start()
    assert current_owner().is_gone() is False
    monkeypatch.setattr("ckstore.process.PROC", tmp_path)
    assert owner.is_gone() is False
    process.kill()
    process.communicate()
    assert owner.is_gone() is True


def test_a_token_fits_into_a_name() -> None:
    assert layout.check_name(f"tmp/{current_owner().token}/x") == f"tmp/{current_owner().token}/x"


@pytest.mark.parametrize("token", ["", "p", "p-1-1", "fffffffffffffff8-0123456789abcdef", "stranger", "../x"])
def test_what_is_no_token_of_this_machine_is_not_gone(token: str) -> None:
    assert token_is_gone(token) is False


@pytest.mark.parametrize("rest", ["", "1", "1-", "-1-1", "x-1", "1-x", "1-1-1", "\u00b2-1"])
def test_a_malformed_token_of_this_machine_is_not_gone(rest: str) -> None:
    where = current_owner().token.rsplit("-", 2)[0]
    assert token_is_gone(f"{where}-{NOBODY}-1") is True
    assert token_is_gone(f"{where}-{rest}") is False

"""Master keys: where they are read, and what is refused without a word of what stands there."""

from __future__ import annotations

import base64
import os
import pickle
import stat
import sys
from pathlib import Path

import pytest

from ckstore.backend.encrypted import command
from ckstore.backend.encrypted.master import KeySource, MasterKey, make_key_file
from ckstore.errors import InvalidInputError

SECRET = bytes(range(32))
HEX = SECRET.hex()
BASE64 = base64.b64encode(SECRET).decode()


def file_with(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return f"file:{path}"


@pytest.mark.parametrize("text", [HEX, HEX.upper(), f" {HEX}\n", BASE64, f"{BASE64}\r\n"])
def test_a_key_in_a_file_a_variable_and_a_command(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", text)
    source = file_with(tmp_path / "a file", text)
    for spelled in (source, "env:THE_KEY", f"command:cat '{tmp_path}/a file'"):
        assert KeySource.parse(spelled).read().reveal() == SECRET


@pytest.mark.parametrize(
    "text", ["", "\n", HEX[:-1], HEX + "0", HEX[:-1] + "g", BASE64[:-1], BASE64 + "=", "x" * 64, HEX + "\n" + HEX]
)
def test_what_is_no_key_is_refused_and_not_repeated(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", text)
    for spelled in (file_with(tmp_path / "key", text), "env:THE_KEY", f"command:cat {tmp_path}/key"):
        with pytest.raises(InvalidInputError, match="gives no key") as caught:
            KeySource.parse(spelled).read()
        assert not text.strip() or text.strip() not in str(caught.value)


def test_a_key_is_never_taken_for_a_source() -> None:
    for text in (HEX, BASE64, f"key:{HEX}", "", "file:", "file:a\0b", "env:", "env:A-B", "env:1A", "command:",
                 "command:'open", "command:a\0", "https://host/key", f"FILE:{HEX}"):  # fmt: skip
        with pytest.raises(InvalidInputError, match="never the key itself") as caught:
            KeySource.parse(text)
        assert HEX not in str(caught.value)
        assert BASE64 not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_that_others_can_open_is_refused(mode: int, tmp_path: Path) -> None:
    source = KeySource.parse(file_with(tmp_path / "key", HEX, mode))
    with pytest.raises(InvalidInputError, match=rf"mode {mode:04o}.*chmod 600 {tmp_path}/key"):
        source.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    source = KeySource.parse(file_with(tmp_path / "key", HEX))
    os.chown(tmp_path / "key", 12345, 12345)
    os.seteuid(23456)
    try:
        with pytest.raises(InvalidInputError, match="key"):
            source.read()
    finally:
        os.seteuid(0)


def test_a_symbolic_link_to_a_key_is_followed(tmp_path: Path) -> None:
    file_with(tmp_path / "key", HEX)
    (tmp_path / "link").symlink_to("key")
    assert KeySource.parse(f"file:{tmp_path}/link").read().reveal() == SECRET


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, message in [("absent", "No such file"), ("pipe", "no regular file"), (".", "Is a directory|no regular")]:
        with pytest.raises(InvalidInputError, match=message):
            KeySource.parse(f"file:{tmp_path}/{name}").read()
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(InvalidInputError, match="THE_KEY, which is to hold a key, is not set"):
        KeySource.parse("env:THE_KEY").read()


def test_a_source_is_the_same_in_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path / "key", HEX)
    monkeypatch.chdir(tmp_path)
    source = KeySource.parse("file:key")
    monkeypatch.chdir("/")
    assert source.spelling == f"file:{tmp_path}/key"
    assert KeySource.parse(source.spelling) == source
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KeySource.parse("file:~/key").read().reveal() == SECRET


def python(code: str) -> str:
    return f'command:"{sys.executable}" -c "{code}"'


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("command:/no/such/program --option", r"command:/no/such/program …, .* cannot be run: No such file"),
        (python(f"print('{HEX}'); raise SystemExit(3)"), "failed with status 3"),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "failed with status -9"),
        (python("import itertools; [print('x' * 1000) for _ in itertools.count()]"), "printed more than 4096 bytes"),
        (python("pass"), "gives no key"),
        ("command:echo $HOME", "gives no key"),
    ],
)
def test_a_command_that_gives_no_key(spelled: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        KeySource.parse(spelled).read()
    assert HEX not in str(caught.value)
    assert "--option" not in str(caught.value)


def test_a_command_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PATIENCE_SECONDS", 0.05)
    for code in ("import signal; signal.pause()", "import os, signal; os.close(1); signal.pause()"):
        with pytest.raises(InvalidInputError, match="took over 0 s"):
            KeySource.parse(python(code)).read()


def test_a_new_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    before = os.umask(0)
    try:
        made = make_key_file(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeySource.parse(f"file:{path}").read().reveal() == made.reveal()
    with pytest.raises(InvalidInputError, match="never written over another"):
        make_key_file(str(path))
    assert path.read_text() == made.reveal().hex() + "\n"
    with pytest.raises(InvalidInputError, match="cannot be written"):
        make_key_file(str(tmp_path / "absent" / "key"))


def test_a_key_shows_its_fingerprint_only() -> None:
    key = MasterKey(SECRET)
    assert repr(key) == str(key) == f"<MasterKey {key.fingerprint}>"
    assert len(key.fingerprint) == 16
    assert key.fingerprint not in HEX
    assert MasterKey(SECRET).fingerprint == key.fingerprint != MasterKey(bytes(32)).fingerprint


def test_an_error_about_a_key_can_be_sent() -> None:
    with pytest.raises(InvalidInputError) as caught:
        KeySource.parse("file:/no/such/key").read()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

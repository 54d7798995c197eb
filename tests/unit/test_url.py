"""From what a user writes to a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.url import backend_of, open_backend
from ckstore.errors import InvalidInputError


def root_of(url: str | Path) -> str:
    backend = open_backend(url)
    assert isinstance(backend, LocalBackend)
    return backend.root


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/some/where", "/some/where"),
        (Path("/some/where"), "/some/where"),
        ("/some//where/", "/some/where"),
        ("/with space/100%25?#", "/with space/100%25?#"),
        ("file:///some/where", "/some/where"),
        ("FILE:///some/where", "/some/where"),
        ("file:/some/where", "/some/where"),
        ("file://localhost/some/where", "/some/where"),
        ("file:///with%20space/100%25%3F%23", "/with space/100%?#"),
        ("file:///%C3%A9", "/é"),
    ],
)
def test_a_path_or_file_url_is_a_directory(url: str | Path, root: str) -> None:
    assert root_of(url) == root


def test_a_relative_path_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert root_of("runs/a") == str(tmp_path / "runs" / "a")


@pytest.mark.parametrize("path", ["/plain", "/with space", "/a%b?c#d", "/é", "/not-utf8-\udcff"])
def test_the_url_of_a_backend_leads_back_to_it(path: str) -> None:
    assert root_of(LocalBackend(path).url) == path
    assert LocalBackend(path).url.isascii()


def test_a_memory_url_is_shared_by_name() -> None:
    one = open_backend("memory://test-url-shared")
    assert isinstance(one, MemoryBackend)
    one.put("things/a", b"x")
    assert open_backend("memory://test-url-shared") is one
    assert open_backend("memory://test-url-other").list("things/") == []
    assert one.url == "memory://test-url-shared"


@pytest.mark.parametrize(
    "url",
    ["", "a\0b", "file:///a%00b", "file://host/path", "file://", "file://relative", "file:///a?b", "file:///a#b",
     "file:///a?", "file:///a?x=1", "memory://", "memory://a/b", "memory://../x",
     "ftp://host/key", "https://host/path", "x+y://z"],
)  # fmt: skip
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_backend(url)


def test_an_unknown_scheme_says_what_is_known() -> None:
    with pytest.raises(InvalidInputError, match=r"gopher:// URLs; use a path, file:///path, memory://name"):
        open_backend("gopher://x")


@pytest.mark.parametrize("store", [None, 5, object(), b"path", ["a"]])
def test_what_names_no_storage_is_refused(store: object) -> None:
    with pytest.raises(InvalidInputError, match="not the place of a store"):
        backend_of(store)


def test_a_backend_is_taken_as_it_is() -> None:
    backend = MemoryBackend()
    assert backend_of(backend) is backend

"""From URLs to filesystems of fsspec: what is taken, what is refused, and that no secret is repeated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckstore.backend.fsspec_files.place import parse
from ckstore.backend.url import open_backend
from ckstore.errors import InvalidInputError


@pytest.mark.parametrize(
    ("url", "protocol", "host", "path"),
    [
        ("gs://bucket/runs/gpt", "gs", "bucket", "/runs/gpt"),
        ("GS://bucket/runs/gpt/", "gs", "bucket", "/runs/gpt"),
        ("gs://bucket", "gs", "bucket", "/"),
        ("az://container@account.dfs.core.windows.net/x", "az", "container@account.dfs.core.windows.net", "/x"),
        ("hdfs:///runs", "hdfs", "", "/runs"),
        ("sftp://me@host:2222/runs", "sftp", "me@host:2222", "/runs"),
        ("webdavs://host/dav/runs", "webdavs", "host", "/dav/runs"),
        ("fsspec+ftp://host/runs", "ftp", "host", "/runs"),
    ],
)
def test_a_url_is_taken_apart(url: str, protocol: str, host: str, path: str) -> None:
    place = parse(url)
    assert (place.protocol, place.host, place.path, place.single_writer) == (protocol, host, path, False)
    assert parse(place.url) == place


def test_the_single_writer_is_declared_in_the_url() -> None:
    assert parse("sftp://host/runs/?single_writer=true").single_writer
    assert parse("sftp://host/runs?single_writer=true").url == "sftp://host/runs?single_writer=true"
    assert not parse("sftp://host/runs?single_writer=false").single_writer


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://", "names no place"),
        ("gs://bucket/a::b", "'::'"),
        ("gs://bucket/a#b", "'#'"),
        ("sftp://host/a/../b", r"'\.\.'"),
        ("sftp://host/a\nb", "not the place"),
        ("sftp://host/a?single_writer=yes", "single_writer is true or false"),
        ("sftp://host/a?key=x", "no option 'key'; there are single_writer"),
        ("sftp://host/a?single_writer=true&single_writer=true", "given twice"),
        ("fsspec+s3://bucket/a", "use s3://"),
        ("fsspec+file:///a", "use a path"),
        ("fsspec+memory://a", "use memory://name"),
        ("fsspec+unheard-of://a/b", "fsspec knows no unheard-of:// filesystem"),
    ],
)
def test_anything_else_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        open_backend(url)


@pytest.mark.parametrize("url", ["sftp://me:hunter2@host/a", "fsspec+ftp://:hunter2@host/a", "gs://x:hunter2@b/a"])
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError, match="must not hold a password") as caught:
        open_backend(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("abfs", "adlfs"), ("webdavs", "webdav4")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.fsspec", None)
    with pytest.raises(InvalidInputError, match=rf"pip install 'ckstore\[fsspec\]' {package}"):
        open_backend(f"{scheme}://bucket/a?single_writer=true")


def test_a_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("ckstore.backend.fsspec_files")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidInputError, match=r"fsspec, which is not installed: pip install 'ckstore\[fsspec\]'"):
        open_backend("gs://bucket/a")


def test_nobody_pays_for_it_who_does_not_use_it() -> None:
    look = "import sys, ckstore; print(sorted({'fsspec', 'paramiko'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

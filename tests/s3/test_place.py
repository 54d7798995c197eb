"""What an S3 URL says, without any server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckstore.backend.s3 import Place, S3Backend
from ckstore.backend.url import open_backend
from ckstore.errors import InvalidInputError


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", Place("bucket")),
        ("s3://bucket/", Place("bucket")),
        ("s3://bucket/runs/gpt", Place("bucket", "runs/gpt")),
        ("s3://bucket/runs/gpt/", Place("bucket", "runs/gpt")),
        ("s3://bucket/runs%20é/50%", Place("bucket", "runs%20é/50%")),
        ("s3://b.c-d/x?region=eu-west-1", Place("b.c-d", "x", region="eu-west-1")),
        ("s3://bucket/x?endpoint=http://[::1]:9000/", Place("bucket", "x", endpoint="http://[::1]:9000")),
        (
            "s3://bucket/x?endpoint=https%3A%2F%2Fs3.example.org",
            Place("bucket", "x", endpoint="https://s3.example.org"),
        ),
        ("s3://bucket/x?profile=my%20own", Place("bucket", "x", profile="my own")),
        ("s3://bucket/x?path_style=true", Place("bucket", "x", path_style=True)),
        ("s3://bucket/x?path_style=false", Place("bucket", "x", path_style=False)),
        ("s3://bucket/x?sse=AES256", Place("bucket", "x", sse="AES256")),
        (
            "s3://bucket/x?sse=aws:kms&sse_key=arn:aws:kms:eu-west-1:1:key/2",
            Place("bucket", "x", sse="aws:kms", sse_key="arn:aws:kms:eu-west-1:1:key/2"),
        ),
        ("s3://bucket/x?checksum=md5", Place("bucket", "x", checksum="md5")),
        ("s3://bucket/x?single_writer=true", Place("bucket", "x", single_writer=True)),
        ("s3://bucket/x?timeout=5&retry=60", Place("bucket", "x", timeout=5, retry=60)),
    ],
)
def test_a_url_is_read_and_spelled_so_that_it_leads_back(url: str, place: Place) -> None:
    assert Place.parse(url) == place
    assert Place.parse(place.url) == place
    backend = open_backend(url)
    assert isinstance(backend, S3Backend)
    assert backend.url == place.url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "not the name of a bucket"),
        ("s3:///prefix", "not the name of a bucket"),
        ("s3://a", "not the name of a bucket"),
        ("s3://bad_name!/x", "not the name of a bucket"),
        ("s3://bucket//x", "never empty"),
        ("s3://bucket/a/../b", "never empty, . or .."),
        ("s3://bucket/a\nb", "printable"),
        ("s3://bucket/" + "x" * 601, "at most 600 bytes"),
        ("s3://bucket/x#part", "no part behind a #"),
        ("s3://bucket/x?colour=blue", "there is no option 'colour'; there are checksum, endpoint, path_style, profile, "
         "region, retry, single_writer, sse, sse_key, timeout"),
        ("s3://bucket/x?bucket=other", "there is no option 'bucket'"),
        ("s3://bucket/x?region=a&region=b", "region is given twice"),
        ("s3://bucket/x?region=", "region has no value"),
        ("s3://bucket/x?region", r"written \?name=value"),
        ("s3://bucket/x?region=eu west", "not the name of a region"),
        ("s3://bucket/x?endpoint=s3.example.org", "endpoint is a URL such as"),
        ("s3://bucket/x?endpoint=http://host:port", "endpoint is a URL such as"),
        ("s3://bucket/x?endpoint=http://[::1", "endpoint is a URL such as"),
        ("s3://bucket/x?endpoint=ftp://host", "endpoint is a URL such as"),
        ("s3://bucket/x?path_style=yes", "path_style is true or false"),
        ("s3://bucket/x?sse=rot13", "sse is one of AES256, aws:kms"),
        ("s3://bucket/x?sse=AES256&sse_key=k", "goes with sse=aws:kms"),
        ("s3://bucket/x?checksum=sha1", "checksum is one of auto, crc32, md5, none"),
        ("s3://bucket/x?retry=0", "retry is a number of seconds from 1 to 3600"),
        ("s3://bucket/x?timeout=1e3", "timeout is a number of seconds"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_url_is_said(url: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_backend(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAUSER:hunter2@bucket/x",
        "s3://hunter2@bucket/x",
        "s3://AKIAUSER:hunter2/more@bucket/x",
        "s3://AKIAUSER:hunter2?more@bucket/x",
        "s3://AKIAUSER:hunter2@bucket/x?colour=blue",
        "s3://AKIAUSER:hunter2@bucket/x?read_limit=1MB/s&read_limit=2MB/s",
        "s3://AKIAUSER:hunter2@bucket/x#part",
        "s3://bucket/x?endpoint=http://user:hunter2@host:9000",
        "s3://bucket/x?endpoint=http%3A%2F%2Fuser%3Ahunter2%40host",
        "s3://bucket/x?secret_key=hunter2",
        "s3://bucket/x?aws_secret_access_key=hunter2&region=eu-west-1",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_backend(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["runs/gpt/config", "runs/gpt/packs/a/0-1"])
def test_keys_are_names_below_the_prefix(key: str) -> None:
    place = Place("bucket", "runs/gpt")
    name = place.name(key)
    assert name is not None
    assert place.key(name) == key


@pytest.mark.parametrize("key", ["runs/gpt", "runs/gpt/", "runs/gpt2/config", "runs/gpt/a//b", "runs/gpt/.x", "config"])
def test_foreign_keys_are_no_names(key: str) -> None:
    assert Place("bucket", "runs/gpt").name(key) is None


def test_the_library_is_loaded_when_it_is_needed() -> None:
    program = """
import sys, ckstore
assert not any(name.split(".")[0] in ("boto3", "botocore") for name in sys.modules)
sys.modules["boto3"] = None
try:
    ckstore.open("s3://bucket/x")
except ckstore.InvalidInputError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "s3:// needs boto3, which is not installed: pip install 'ckstore[s3]'\n"

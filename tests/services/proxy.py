"""A proxy between an S3 client and its server that spoils chosen requests, and can say that it did.

It forwards whole requests one by one, so that what happens is the same however the network cuts them up.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

ANY = "*"
VERBS = (
    "get", "head", "put", "create", "delete", "list", "begin", "part", "complete", "abort", "uploads", "parts", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came from the client: its first line and headers as they are, its body whole."""

    head: bytes
    body: bytes

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def verb(self) -> str:
        """Which of VERBS it is."""
        query = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        match self.method:
            case "GET" if "list-type" in query:
                return "list"
            case "GET" if "uploads" in query:
                return "uploads"
            case "GET" if "uploadId" in query:
                return "parts"
            case "GET" | "HEAD":
                return self.method.lower()
            case "PUT" if "partNumber" in query:
                return "part"
            case "PUT":
                return "create" if b"\r\nif-none-match:" in self.head.lower() else "put"
            case "POST" if "uploads" in query:
                return "begin"
            case "POST" if "uploadId" in query:
                return "complete"
            case "DELETE":
                return "abort" if "uploadId" in query else "delete"
        return "other"


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: status line and headers, and the body. `cut` closes the connection after so many bytes of it."""

    head: bytes
    body: bytes
    cut: int | None = None

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])


Forward = Callable[[Request], Answer]
Effect = Callable[[Request, Forward], Answer | None]
"""What becomes of a request; None closes the connection without an answer."""


def drop(request: Request, forward: Forward) -> Answer | None:
    """The request never arrives."""
    return None


def lose(request: Request, forward: Forward) -> Answer | None:
    """The request has its effect, and its answer is lost."""
    forward(request)
    return None


def truncate(request: Request, forward: Forward) -> Answer | None:
    """Half of the answer's body arrives, and then the connection breaks; of one without a body, nothing."""
    answer = forward(request)
    return Answer(answer.head, answer.body, cut=len(answer.body) // 2) if answer.body else None


def flip(request: Request, forward: Forward) -> Answer | None:
    """One bit of the request's body arrives as another; a request without one is dropped."""
    if not request.body:
        return None
    middle = len(request.body) // 2
    body = request.body[:middle] + bytes([request.body[middle] ^ 1]) + request.body[middle + 1 :]
    return forward(Request(request.head, body))


def answer(status: int, code: str = "", headers: dict[str, str] | None = None, body: bytes | None = None) -> Effect:
    """The request never arrives; this comes back instead."""
    if body is None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()

    def effect(request: Request, forward: Forward) -> Answer | None:
        assert body is not None
        return made(status, b"" if request.method == "HEAD" else body, headers or {})

    return effect


def after(effect: Effect) -> Effect:
    """`effect`, once the request has been carried out."""

    def act(request: Request, forward: Forward) -> Answer | None:
        forward(request)
        return effect(request, forward)

    return act


def made(status: int, body: bytes, headers: dict[str, str]) -> Answer:
    lines = [f"HTTP/1.1 {status} by the proxy", f"Content-Length: {len(body)}", "Content-Type: application/xml"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return Answer(("\r\n".join(lines) + "\r\n\r\n").encode(), body)


@dataclass(slots=True)
class Fault:
    """What becomes of requests `at` to `at` + `times` - 1 (from 1) of those of `verb` whose target holds `where`."""

    verb: str
    at: int
    effect: Effect
    times: int = 1
    where: str = ""
    matched: int = 0
    fired: int = 0


@dataclass(slots=True)
class Proxy:
    """Listens at `endpoint`; every request of every connection passes through `faults`."""

    server: str
    faults: list[Fault]
    _listener: socket.socket
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Verb and target of every request so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def spoil(self, *faults: Fault) -> None:
        """From now on these faults, and no others; what was counted is forgotten."""
        with self._lock:
            self.faults = list(faults)
            self.requests = []

    def assert_fired(self) -> None:
        """Every fault came to pass at least once: otherwise a test has tested nothing."""
        silent = [fault for fault in self.faults if not fault.fired]
        assert not silent, f"never fired: {silent}; requests were {self.requests}"

    def count(self) -> int:
        with self._lock:
            return len(self.requests)

    def cut_all(self) -> None:
        """Break every connection there is, in whatever it is."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _due(self, request: Request) -> Effect | None:
        with self._lock:
            self.requests.append((request.verb, request.target))
            found = None
            for fault in self.faults:
                if fault.verb not in (ANY, request.verb) or fault.where not in request.target:
                    continue
                fault.matched += 1
                if found is None and fault.at <= fault.matched < fault.at + fault.times:
                    fault.fired += 1
                    found = fault.effect
            return found

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        parts = urlsplit(self.server)
        with suppress(OSError, EOFError, ValueError), closing(client):
            upstream = socket.create_connection((parts.hostname, parts.port), timeout=60)
            for end in (client, upstream):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, upstream}
            try:
                with closing(upstream), client.makefile("rb") as ours, upstream.makefile("rb") as theirs:
                    while True:
                        request = _read_request(ours, client)
                        effect = self._due(request)

                        def forward(given: Request) -> Answer:
                            upstream.sendall(given.head)
                            upstream.sendall(given.body)
                            return _read_answer(theirs, given.method)

                        found = forward(request) if effect is None else effect(request, forward)
                        if found is None:
                            return
                        client.sendall(found.head)
                        client.sendall(found.body[: found.cut])
                        if found.cut is not None or b"\r\nconnection: close" in found.head.lower():
                            return
            finally:
                with self._lock:
                    self._open -= {client, upstream}


@contextmanager
def proxied(server: str, *faults: Fault) -> Iterator[Proxy]:
    """A proxy before the endpoint `server`."""
    proxy = Proxy(server, list(faults), socket.create_server(("127.0.0.1", 0), backlog=100))
    thread = threading.Thread(target=proxy._listen, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        with suppress(OSError):
            proxy._listener.shutdown(socket.SHUT_RDWR)
        proxy._listener.close()
        proxy.cut_all()
        thread.join()


def _read_head(file: BinaryIO) -> list[bytes]:
    lines: list[bytes] = []
    while True:
        line: bytes = file.readline()
        if not line:
            raise EOFError
        if line == b"\r\n":
            return lines
        lines.append(line)


def _value(lines: list[bytes], name: bytes) -> bytes | None:
    for line in lines[1:]:
        found, _, value = line.partition(b":")
        if found.strip().lower() == name:
            return value.strip()
    return None


def _read_request(file: BinaryIO, client: socket.socket) -> Request:
    lines = _read_head(file)
    if _value(lines, b"expect") is not None:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        lines = [line for line in lines if not line.lower().startswith(b"expect:")]
    size = int(_value(lines, b"content-length") or 0)
    return Request(b"".join(lines) + b"\r\n", _exactly(file, size))


def _read_answer(file: BinaryIO, method: str) -> Answer:
    lines = _read_head(file)
    status = int(lines[0].split(b" ", 2)[1])
    if status == 100:
        return _read_answer(file, method)
    if method == "HEAD" or status in (204, 304):
        return Answer(b"".join(lines) + b"\r\n", b"")
    if (_value(lines, b"transfer-encoding") or b"").lower() != b"chunked":
        return Answer(b"".join(lines) + b"\r\n", _exactly(file, int(_value(lines, b"content-length") or 0)))
    body = b"".join(_chunks(file))
    kept = [line for line in lines if not line.lower().startswith(b"transfer-encoding:")]
    return Answer(b"".join(kept) + b"Content-Length: %d\r\n\r\n" % len(body), body)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while True:
        size = int(file.readline(), 16)
        chunk = _exactly(file, size)
        file.readline()
        if not size:
            return
        yield chunk


def _exactly(file: BinaryIO, size: int) -> bytes:
    found: bytes = file.read(size)
    if len(found) != size:
        raise EOFError
    return found

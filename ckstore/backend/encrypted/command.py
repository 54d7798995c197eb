"""A command that prints a key: run without a shell, its output bounded in size and time, and never shown."""

from __future__ import annotations

import os
import select
import subprocess
import time
from typing import IO

from ckstore.errors import InvalidInputError

PATIENCE_SECONDS = 60.0
"""How long a command may take: it may ask a service, or a person."""


def output_of(words: list[str], shown: str, most: int) -> bytes:
    """What the command `words` prints. `shown` names it in errors: `InvalidInputError` if it fails, takes too long or
    prints more than `most` bytes. Its stderr is ours."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0)
    except OSError as error:
        raise InvalidInputError(f"{shown}, which is to print a key, cannot be run: {error.strerror}") from error
    try:
        assert process.stdout is not None
        text = _read(process.stdout, deadline, most)
        if len(text) > most:
            raise InvalidInputError(f"{shown}, which is to print a key, printed more than {most} bytes")
        status = process.wait(max(deadline - time.monotonic(), 0))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise InvalidInputError(f"{shown}, which is to print a key, took over {PATIENCE_SECONDS:.0f} s") from None
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if status:
        raise InvalidInputError(f"{shown}, which is to print a key, failed with status {status}")
    return text


def _read(stream: IO[bytes], deadline: float, most: int) -> bytes:
    """All of it, or `most` bytes and one or more; `TimeoutError` at the deadline."""
    poll = select.poll()
    poll.register(stream, select.POLLIN | select.POLLHUP)
    text = b""
    while len(text) <= most:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        piece = os.read(stream.fileno(), most + 1 - len(text))
        if not piece:
            break
        text += piece
    return text

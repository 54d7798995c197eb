"""The writer process: see `ckstore.writer`."""

from __future__ import annotations

import argparse
import signal
import socket

from ckstore.writer.service import serve


def main() -> None:
    """Serve the socket that was inherited."""
    parser = argparse.ArgumentParser(prog="python -m ckstore.writer", description="Started by ckstore, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket")
    fd = parser.parse_args().fd
    # What asks the training to end asks this process to finish: it ends when the trainer has closed its end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=fd)
    end.setblocking(True)  # a default timeout, which a sitecustomize may set, is none of its own
    serve(end)


if __name__ == "__main__":
    main()

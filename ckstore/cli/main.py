"""The entry point of `ckstore` and `python -m ckstore`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    try:
        from ckstore.cli.app import app  # here, so that Ctrl-C while libraries load is answered like any other

        app(prog_name="ckstore")
        code: int | str | None = 0
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = 130
    from ckstore.cli.output import close_stdout

    close_stdout()
    sys.exit(code)

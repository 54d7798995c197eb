"""What an error of fsspec, or of a library behind it, means to the caller of a backend."""

from __future__ import annotations

import errno

from ckstore.backend.oserrors import backend_error
from ckstore.errors import BackendError, CkstoreError

ABSENT = (FileNotFoundError, NotADirectoryError)
"""What a filesystem says of a name that is not there, or that would be below a file."""

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_REFUSED = {401, 403}


def translated(error: Exception, doing: str) -> CkstoreError:
    """The error for `error` met while `doing`, which says what to do; the caller chains it.

    The text of a library's error is left to the chain: it may hold a signed URL.
    """
    if isinstance(error, CkstoreError):
        return error
    code = _code(error)
    if isinstance(error, PermissionError) or code in _REFUSED or _says_forbidden(error):
        return BackendError(f"cannot {doing}: not allowed; look after the credentials that the library finds")
    if isinstance(error, NotImplementedError):
        return BackendError(f"cannot {doing}: this filesystem cannot do that, so that it cannot hold a store")
    if isinstance(error, FileNotFoundError) or code == 404:
        return BackendError(f"cannot {doing}: there is no such bucket, container or directory; make it first")
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return backend_error(error, doing)
    name = type(error).__name__ + (f" {code}" if code else "")
    return BackendError(f"cannot {doing}: {name}", retryable=_may_pass(error, code))


def _may_pass(error: Exception, code: int | None) -> bool:
    """An error without a code is one of the connection, as far as can be told."""
    if isinstance(error, ConnectionError | TimeoutError | EOFError):
        return True
    return code in _PASSING if code else isinstance(error, OSError) or "Timeout" in type(error).__name__


def _code(error: Exception) -> int | None:
    """The status that a service answered with, wherever a library keeps it."""
    for name in ("code", "status", "status_code"):
        found = getattr(error, name, None)
        if isinstance(found, int | str) and str(found).isdecimal() and 400 <= int(found) < 600:
            return int(found)
    return None


def _says_forbidden(error: Exception) -> bool:
    """gcsfs makes an OSError of a 403."""
    return isinstance(error, OSError) and error.errno is None and str(error).startswith("Forbidden")

"""What an `OSError` of the local disk means to the caller of a backend."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.errors import BackendError, NoSpaceError

FULL = {errno.ENOSPC, errno.EDQUOT}
"""No room left, on the disk or for this user."""
_MAY_PASS = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
    errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""What `link` says on a filesystem that has no hard links."""
NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV}
"""What `preallocate` says on a filesystem that cannot reserve space."""


def backend_error(error: OSError, doing: str) -> BackendError:
    """The `BackendError` for `error` met while `doing`; the caller chains it."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in FULL:
        return NoSpaceError(
            f"cannot {doing}: the storage is full{where}; free space with `ckstore prune` and `ckstore gc`"
        )
    if error.errno == errno.EXDEV:
        return BackendError(f"cannot {doing}: all of a store must be on one filesystem{where}")
    return BackendError(f"cannot {doing}: {reason}{where}", retryable=error.errno in _MAY_PASS)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Within it an `OSError` becomes the `BackendError` it means."""
    try:
        yield
    except OSError as error:
        raise backend_error(error, doing) from error

"""Storages that the library fsspec reaches: Google, Azure, Hadoop, SFTP, WebDAV and whatever else has a plug-in for it.

    place        from a URL to what is to be opened; no credentials pass through it
    kinds        what is known of each filesystem: how an object becomes visible whole, and whether one can be created
    lending      instances of a filesystem, for many threads
    sftp         connections to known hosts only, many requests under way at once
    failures     what a library's error means to the caller of a backend
    listing      what is there: whole, or an error
    writing      objects on their way to their names
    stream       one that is written piece by piece
    files        the backend

The package, and fsspec with it, is imported when such a place is opened, not before.
"""

from __future__ import annotations

from ckstore.backend.fsspec_files.files import FsspecBackend
from ckstore.backend.fsspec_files.place import open_url

__all__ = ["FsspecBackend", "open_url"]

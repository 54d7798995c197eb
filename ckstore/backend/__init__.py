"""Storages: dumb durable bytes behind one small protocol (`base`), a directory (`local`), memory (`memory`)."""

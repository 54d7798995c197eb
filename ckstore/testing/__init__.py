"""A test kit for storages and for what is built on them.

- `contract.BackendContract`: the tests that every backend passes; subclass it (needs pytest).
- `faults`: `FaultyBackend` and `FaultyFs` fail a chosen call, and say whether it came to that; `CountingBackend`.
- `latency`: `LatencyBackend` puts a link between a store and its storage.
- `simfs.SimFs`: a file system in memory that logs every change; `crashes`: what a crash could leave of it.
"""

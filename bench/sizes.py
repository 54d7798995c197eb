"""How small snapshots become: of real training, of real weights, and of noise; against compressors and backup tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch
import zstandard

from bench.harness import Claim, Contender, Result, Settings, alternate, remove, size_of
from bench.states import State, Training, bf16, memory, minilm, nbytes, part, random_state
from bench.subject import Subject

PHASES = {"early": 20, "late": 500}
"""At which step of the training the first of four snapshots is taken."""
LATER = (1, 10, 100)
PROFILES = ("fast", "balanced", "compact")
KINDS: Mapping[str, Callable[[State], State]] = {
    "weights bf16": lambda whole: bf16(part(whole, "weights")),
    "weights fp32": lambda whole: part(whole, "weights"),
    "whole state": lambda whole: part(whole, "whole"),
}
GOALS = {"weights bf16": 10.0, "weights fp32": 1.8, "whole state": 1.5}


def sizes(settings: Settings) -> Result:
    """Raw bytes over stored bytes of the second of two snapshots of one training, some steps apart."""
    result = Result("sizes", "Times smaller than raw: a snapshot of AdamW training, saved after one some steps earlier")
    training = Training(threads=os.cpu_count() or 1)
    for phase, first in PHASES.items():
        taken = dict(training.snapshots([first, *(first + n for n in LATER)]))
        for kind, cut in KINDS.items():
            parts = {step: cut(whole) for step, whole in taken.items()}
            for later in LATER:
                _pair(result, settings, f"{phase}, {kind}, {later} later", parts[first], parts[first + later])
    for name, state in {"noise fp32": random_state(16 << 20), "noise bf16": bf16(random_state(16 << 20))}.items():
        _single(result, settings, name, state)
    for kind, goal in GOALS.items():
        _claims(result, f"late, {kind}, 1 later", goal)
    return result


def _claims(result: Result, row: str, goal: float) -> None:
    ours = result.value(f"{row}: ckstore, compact") or 0.0
    result.claims.append(Claim(f"times smaller than raw, {row}, compact", ours, goal))
    for peer in ("zstd", "ZipNN"):
        result.claim_ratio(f"of the ratio of {peer}, {row}", f"{row}: ckstore, compact", f"{row}: {peer}", 1.0)


def _pair(result: Result, settings: Settings, row: str, before: State, after: State) -> None:
    raw = nbytes(after)
    for profile in PROFILES:
        subject = Subject(settings.folder, profile)
        subject.save(before)
        _add(result, row, f"ckstore, {profile}", raw / subject.save(after).stored_bytes)
        subject.store.close()
        remove(subject.path)
    _compressors(result, row, after)
    for tool, grow in BACKUPS.items():
        if shutil.which(tool) is None:
            result.skipped[tool] = f"there is no program {tool} here; Debian: apt-get install {_DEBIAN[tool]}"
        else:
            _add(result, row, tool, raw / grow(settings.folder / tool, before, after))
            remove(settings.folder / tool)


def _single(result: Result, settings: Settings, row: str, state: State) -> None:
    for profile in PROFILES:
        subject = Subject(settings.folder, profile)
        _add(result, row, f"ckstore, {profile}", nbytes(state) / subject.save(state).stored_bytes)
        subject.store.close()
        remove(subject.path)
    _compressors(result, row, state)


def _compressors(result: Result, row: str, state: State) -> None:
    _add(result, row, "zstd", nbytes(state) / zstd_size(state))
    try:
        _add(result, row, "ZipNN", nbytes(state) / zipnn_size(state))
    except Exception as error:  # a peer may fail in any way
        result.skipped["ZipNN"] = f"{type(error).__name__}: {error}"[:300]


def _add(result: Result, row: str, who: str, ratio: float) -> None:
    result.add(f"{row}: {who}", "x", [ratio])


def zstd_size(state: State) -> int:
    """zstd at its default level, on two threads, tensor by tensor."""
    compressor = zstandard.ZstdCompressor(level=3, threads=2)
    return sum(len(compressor.compress(memory(tensor))) for tensor in state.values())


def zipnn_size(state: State) -> int:
    """ZipNN as it comes, tensor by tensor; it does not take 0-dimensional ones, which stay raw."""
    zipnn = import_module("zipnn")
    total = 0
    for tensor in state.values():
        if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.ndim == 0:
            total += tensor.nbytes
            continue
        kind = "bfloat16" if tensor.dtype == torch.bfloat16 else "float32"
        coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=kind, threads=2)
        # It writes into what it is given.
        total += min(len(coder.compress(bytearray(memory(tensor)))), tensor.nbytes)
    return total


def _borg(place: Path, before: State, after: State) -> int:
    run = _runner({"BORG_BASE_DIR": str(place / "home"), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"})
    repository, file = place / "repository", place / "state"
    _write(file, before)
    run("borg", "init", "--encryption=none", str(repository))
    run("borg", "create", "--compression", "zstd", f"{repository}::before", str(file))
    held = size_of(repository)
    _write(file, after)
    run("borg", "create", "--compression", "zstd", f"{repository}::after", str(file))
    return size_of(repository) - held


def _restic(place: Path, before: State, after: State) -> int:
    run = _runner({"RESTIC_PASSWORD": "benchmark", "RESTIC_CACHE_DIR": str(place / "cache")})
    repository, file = place / "repository", place / "state"
    _write(file, before)
    run("restic", "init", "--repo", str(repository))
    run("restic", "backup", "--repo", str(repository), "--compression", "auto", str(file))
    held = size_of(repository)
    _write(file, after)
    run("restic", "backup", "--repo", str(repository), "--compression", "auto", str(file))
    return size_of(repository) - held


BACKUPS: Mapping[str, Callable[[Path, State, State], int]] = {"borg": _borg, "restic": _restic}
_DEBIAN = {"borg": "borgbackup", "restic": "restic"}


def _write(file: Path, state: State) -> None:
    """The raw bytes of every tensor, one behind the other."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for tensor in state.values():
            out.write(memory(tensor))


def _runner(more: dict[str, str]) -> Callable[..., None]:
    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **more})

    return run


def real_weights(settings: Settings) -> Result:
    """The real weights of a sentence model: ratio and speed of a full snapshot, in fp32 and cast to bf16."""
    result = Result("weights", "A full snapshot of real weights (all-MiniLM-L6-v2): times smaller than raw, and GB/s")
    weights = minilm()
    for kind, state in {"fp32": weights, "bf16": bf16(weights)}.items():
        subjects = [Subject(settings.folder, profile, name=f"{profile}-{kind}") for profile in PROFILES]
        contenders = [
            *(subject.saver(state, f"{kind}: ckstore, {subject.profile}", changed=False) for subject in subjects),
            Contender(f"{kind}: zstd", lambda state=state: zstd_size(state)),  # type: ignore[misc]
            Contender(f"{kind}: ZipNN", lambda state=state: zipnn_size(state)),  # type: ignore[misc]
        ]
        times = alternate(result, contenders, settings.rounds)
        for name, took in times.items():
            result.add(f"{name}, speed", "GB/s", [nbytes(state) / seconds / 1e9 for seconds in took])
        _compressors(result, kind, state)
        for subject in subjects:
            result.add(f"{kind}: ckstore, {subject.profile}", "x", subject.ratios)
            subject.store.close()
    smallest = result.value("bf16: ckstore, balanced") or 0.0
    result.claims.append(Claim("times smaller than raw, real bf16 weights, balanced", smallest, 1.5))
    result.claim_ratio("of the ratio of ZipNN, bf16", "bf16: ckstore, balanced", "bf16: ZipNN", 1.0)
    result.claim_ratio(
        "of the speed of ZipNN, bf16 (ckstore writes to disk, ZipNN does not)",
        "bf16: ckstore, balanced, speed", "bf16: ZipNN, speed", 1.0,
    )  # fmt: skip
    return result

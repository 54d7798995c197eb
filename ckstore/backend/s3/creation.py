"""Creating an object that must not be there: one conditional PUT, of which one writer wins.

Each call marks what it writes with an id of its own. When an answer is lost, or the PUT is refused after that, the
object itself tells who wrote it: what looks like somebody else's success may be this call's own.
"""

from __future__ import annotations

from typing import Any

from ckstore.backend.s3.calls import NOTHING, Answer, Calls, Refused
from ckstore.backend.s3.checksums import Checksums
from ckstore.backend.s3.look import WRITE_ID, look, write_id_of
from ckstore.backend.s3.verdict import FAILURES, TAKEN, judge
from ckstore.errors import BackendError
from ckstore.ids import new_nonce


def new_write_id() -> str:
    return new_nonce() + new_nonce()


def create(
    calls: Calls,
    checksums: Checksums,
    key: str,
    data: bytes,
    more: dict[str, Any],
    expected: frozenset[str] = NOTHING,
) -> bool:
    """Create the object at `key`; False if somebody else did. `more` are parameters that go with every PUT.

    `BackendError` when it cannot be found out which, `Refused` for codes that are `expected`.
    """
    doing = f"create {key}"
    ours = new_write_id()
    parameters = {
        "Key": key, "Body": data, "IfNoneMatch": "*", "Metadata": {WRITE_ID: ours}, **more, **checksums.of(data)
    }  # fmt: skip
    patience, unsure = calls.patience(), False
    while True:
        try:
            answer = checked(calls.once("put_object", parameters), doing, calls)
            checksums.learn(parameters, answer)
            return True
        except FAILURES as error:
            failure = judge(error, doing, calls.place)
            if failure.code in TAKEN:
                return _is_ours(calls, key, ours, unsure)
            if failure.code in expected:
                raise Refused(failure, error) from error
            unsure = unsure or failure.unsure
            try:
                calls.wait_after(failure, patience, error)
            except BackendError:
                if unsure and _landed(calls, key, ours):
                    return True
                raise


def checked(answer: Answer, doing: str, calls: Calls) -> Answer:
    """The answer to a PUT; `BackendError` if it is none that a server which keeps objects gives."""
    if not answer.get("ETag"):
        raise BackendError(
            f"cannot {doing}: the answer lacks what S3 says of an object (ETag): is a proxy between here and "
            f"{calls.place.server}?"
        )
    return answer


def _is_ours(calls: Calls, key: str, ours: str, unsure: bool) -> bool:
    """Whether what is in the way of a PUT is what an earlier try of the same call has put there."""
    found = look(calls, key, f"see who created {key}")
    if found is None and unsure:
        raise BackendError(
            f"cannot create {key}: its answer was lost, and what then stood there is gone: whose it was is unknown"
        )
    return found is not None and found.write_id == ours


def _landed(calls: Calls, key: str, ours: str) -> bool:
    """The last look when patience has ended; False also if that cannot be seen."""
    try:
        return write_id_of(calls.once("head_object", {"Key": key})) == ours
    except FAILURES:
        return False

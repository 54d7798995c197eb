"""Refs: how people name a snapshot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ckstore import refs
from ckstore.errors import InvalidInputError, NotFoundError
from ckstore.ids import new_nonce
from ckstore.refs import Ref, parse
from ckstore.store import Store


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", Ref("latest")),
        ("123", Ref("step", "123")),
        (123, Ref("step", "123")),
        (0, Ref("step", "0")),
        ("step:123", Ref("step", "123")),
        ("id:9f3c", Ref("id", "9f3c")),
        ("9f3c", Ref("bare", "9f3c")),
        ("tag:best", Ref("tag", "best")),
        ("tag:123", Ref("tag", "123")),
        ("branch:exp", Ref("branch", "exp")),
        ("best", Ref("bare", "best")),
        ("exp@latest", Ref("latest", branch="exp")),
        ("exp@123", Ref("step", "123", "exp")),
        ("exp@9f3c", Ref("bare", "9f3c", "exp")),
    ],
)
def test_refs_are_read(text: str | int, expected: Ref) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "x" * 500, "step:", "step:x", "step:-1", -1, True, None, 1.0, b"latest", "kind:x", "id:", "@latest",
     "../x@latest", "tag:../x", "branch:a b", "step:" + "9" * 20, "-x@1"],
)  # fmt: skip
def test_what_can_be_no_ref_is_refused(text: object) -> None:
    with pytest.raises(InvalidInputError):
        parse(text)  # type: ignore[arg-type]


def filled(store: Store, *rows: tuple[int, str]) -> list[str]:
    return [store.save({"n": np.int64(n)}, step=step, branch=branch).id for n, (step, branch) in enumerate(rows)]


def test_latest_is_the_newest_of_main(store: Store) -> None:
    first, second, _ = filled(store, (1, "main"), (2, "main"), (9, "exp"))
    assert store.resolve().id == second
    assert store.resolve("latest").id == second
    assert store.resolve("1").id == first


def test_latest_is_of_the_only_branch_there_is(store: Store) -> None:
    (only,) = filled(store, (1, "exp"))
    assert store.resolve().id == only


def test_latest_of_several_branches_without_main_is_not_guessed(store: Store) -> None:
    filled(store, (1, "a"), (1, "b"))
    with pytest.raises(NotFoundError, match="no good snapshot on branch main; branches with snapshots: a, b"):
        store.resolve()


def test_an_empty_store_says_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="the store holds no snapshot"):
        store.resolve()


def test_the_newest_of_a_step_wins(store: Store) -> None:
    old, new = filled(store, (5, "main"), (5, "main"))
    assert store.resolve(5).id == store.resolve("step:5").id == new
    assert store.resolve(f"id:{old}").id == old


def test_a_quarantined_one_of_a_step_gives_way_to_a_good_one(store: Store) -> None:
    old, new = filled(store, (5, "main"), (5, "main"))
    store.quarantine(f"id:{new}", "test")
    assert store.resolve(5).id == old
    store.quarantine(f"id:{old}", "test")
    assert store.resolve(5).id == new


def test_main_comes_before_other_branches_and_others_are_ambiguous(store: Store) -> None:
    _, exp, twin, main = filled(store, (1, "main"), (2, "exp"), (2, "twin"), (3, "main"))
    with pytest.raises(InvalidInputError, match=rf"'2' is ambiguous; say which: .*id:{exp} \(step 2, exp\)"):
        store.resolve(2)
    assert store.resolve("twin@2").id == twin
    filled(store, (3, "exp"))
    assert store.resolve(3).id == main


def test_a_branch_is_named_with_or_without_its_kind(store: Store) -> None:
    _, exp = filled(store, (1, "main"), (2, "exp"))
    assert store.resolve("exp").id == store.resolve("branch:exp").id == store.resolve("exp@latest").id == exp


def test_a_bare_branch_floats_as_its_long_form_does(store: Store) -> None:
    filled(store, (1, "main"))
    first, second = filled(store, (2, "exp"), (3, "exp"))
    store.quarantine(f"id:{second}", "test")
    assert store.resolve("exp").id == first
    store.quarantine(f"id:{first}", "test")
    with pytest.raises(NotFoundError, match="no good snapshot on branch exp"):
        store.resolve("exp")


def test_a_tag_moves_to_the_last_that_took_it(store: Store) -> None:
    first, second = filled(store, (1, "main"), (2, "main"))
    store.tag("best", "1")
    assert store.resolve("best").id == store.resolve("tag:best").id == first
    assert store.tag("best", 2).tags == ("best",)
    assert store.resolve("best").id == second
    store.untag("best")
    with pytest.raises(NotFoundError, match="no snapshot 'best'"):
        store.resolve("best")
    with pytest.raises(NotFoundError, match="there is no tag 'best'"):
        store.untag("best")


def test_a_name_that_is_a_tag_and_a_branch_is_ambiguous(store: Store) -> None:
    main, exp = filled(store, (1, "main"), (2, "exp"))
    store.tag("exp", "main@1")
    with pytest.raises(InvalidInputError, match="'exp' is ambiguous"):
        store.resolve("exp")
    assert store.resolve("tag:exp").id == main
    assert store.resolve("branch:exp").id == exp


def test_a_name_that_means_one_snapshot_twice_is_not_ambiguous(store: Store) -> None:
    _, exp = filled(store, (1, "main"), (2, "exp"))
    store.tag("exp", f"id:{exp}")
    assert store.resolve("exp").id == exp


def test_notes_beside_the_only_branch_do_not_make_it_two(store: Store) -> None:
    first, *_ = filled(store, (1, "exp"), (2, "exp.metadata"))
    assert store.resolve("latest").id == first
    filled(store, (3, "other"))
    with pytest.raises(NotFoundError):
        store.resolve("latest")


def test_an_id_may_be_cut_to_four_digits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    nonces = itertools.chain(["abcd111111111111", "abcd222222222222"], iter(new_nonce, ""))
    monkeypatch.setattr("ckstore.saver.new_nonce", lambda: next(nonces))
    first, _ = filled(store, (1, "main"), (2, "main"))
    assert store.resolve("abcd1").id == store.resolve("id:abcd1").id == first
    with pytest.raises(InvalidInputError, match="ambiguous; say which: id:abcd"):
        store.resolve("abcd")
    with pytest.raises(InvalidInputError, match="not an id"):
        store.resolve("id:abc")
    with pytest.raises(InvalidInputError, match="not an id"):
        store.resolve("id:ABCD")
    with pytest.raises(NotFoundError):
        store.resolve("id:abcd3")


def test_a_missing_step_is_not_found_with_a_hint(store: Store) -> None:
    filled(store, (1, "main"))
    with pytest.raises(NotFoundError, match="no snapshot '7'; `ckstore ls` shows what there is"):
        store.resolve(7)
    with pytest.raises(NotFoundError):
        store.resolve("nobody@latest")


def test_only_floating_refs_have_a_second_choice() -> None:
    assert [parse(text).floats for text in ("latest", "branch:x", "x@latest", "5", "id:abcd", "tag:x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert refs.MAIN == "main"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "x" * 101, "a b", "tag\n", "é", None, 3])
def test_hostile_labels_are_refused_before_anything_is_written(store: Store, name: object) -> None:
    with pytest.raises(InvalidInputError):
        store.save({"a": 1}, step=1, branch=name)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        store.save({"a": 1}, step=1, tags=[name])  # type: ignore[list-item]
    assert store.snapshots() == []
    store.save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError):
        store.tag(name)  # type: ignore[arg-type]
    assert store.tags() == {}


def test_tags_as_one_text_are_refused_with_the_remedy(store: Store) -> None:
    with pytest.raises(InvalidInputError, match=r"write tags=\['best'\]"):
        store.save({"a": 1}, step=1, tags="best")

"""Which of the words on a command line is the store."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.errors import InvalidInputError


def split(
    words: Sequence[str], fewest: int, most: int, option: str | None, environment: str | None
) -> tuple[str, tuple[str, ...]]:
    """The store and the other words, of which there are `fewest` to `most`.

    `--store` wins; then all words are others. Else the first word is the store, unless the environment names one and
    the words may all be others, or have to be. A word with a slash is a store there, as no ref and no tag holds one.
    """
    if option is not None:
        store, rest = option, tuple(words)
    elif words and (not environment or len(words) > most or (len(words) > fewest and _is_place(words[0]))):
        store, rest = words[0], tuple(words[1:])
    elif environment:
        store, rest = environment, tuple(words)
    else:
        raise InvalidInputError("which store? Give it as the first argument, with --store, or in CKSTORE_STORE")
    if len(rest) > most:
        raise InvalidInputError(f"unexpected argument {rest[most]!r}; -h shows what there may be")
    if len(rest) < fewest:
        raise InvalidInputError(
            f"{fewest} argument{'s are' if fewest > 1 else ' is'} needed besides the store {store!r}, not {len(rest)}; "
            "-h shows which"
        )
    return store, rest


def _is_place(word: str) -> bool:
    return "/" in word or word in (".", "..")

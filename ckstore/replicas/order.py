"""The storages of a store from the fastest to the slowest: the authority, then copies as their tiers say (pure)."""

from __future__ import annotations

from ckstore.format.records import StoragePlace, Term


def ordered(term: Term) -> list[StoragePlace]:
    """The members, the authority first, then by the order of their tiers, then as the term lists them."""
    return sorted(term.members, key=lambda place: (place.name != term.authority, place.tier.order if place.tier else 0))


def has_tiers(term: Term) -> bool:
    """Whether anything is said of what a storage keeps."""
    return any(place.tier is not None for place in term.members)

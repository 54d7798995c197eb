"""Tiers: the storages of one store from the fastest to the slowest, and which snapshots' packs are on which (SPEC §14).

Records, manifests and marks stand on every tier, packs need not: `evicted` says of a snapshot that its packs went from
a storage, after they were verified on a lower one. Nothing else changes by that: it is listed, and restored, as before.

    policy      what goes where by rules (pure)
    rules       what people say of a tier
    closures    the packs of a snapshot as they stand on a storage
    verifying   a snapshot on a tier read back
    judging     whether a snapshot may be evicted as things stand
    evicting    letting go of packs
    settling    marks of evictions that nobody stands for any more
    freeing     packs that were evicted from a copy, deleted
    pulling     packs brought back; thawing asks an archive for them
    survey      what every tier holds
    running     the steps of a plan, taken
    report      all that for people
    group       the tiers of an open store
    background  the rules applied beside saves
"""

"""One store on several storages: who decides, what is copied where, and what becomes of it when one is lost (SPEC §12).

A store on several storages has *members*: one is the *authority*, where saves are decided and removed; the others are
*copies*, with the same objects under the same names. A numbered *term* says which is which.

    quorum        how many members are enough, for counting a snapshot and for placing a term (pure)
    terms         terms read from a storage, and placed on it
    storages      the members as contexts, opened when they are needed
    pack_copy     a pack on its way, every byte of it checked
    closure       what a snapshot needs, and what of that a storage lacks
    mirror        small records: config, terms, epochs, facts made by hand, tags, the floor
    copying       one snapshot from one storage to another
    reconciling   what a member holds that a new authority never knew is set aside
    removal       removing from a copy, and freeing there
    tidying       what a copy holds too much, as the order of its steps
    catching_up   all that a copy lacks, and what it holds too much
    absorbing     a new authority takes over what others hold
    counting      whether a snapshot counts: on the authority, on a copy
    feeds         one thread for each copy that brings it what it lacks
    shipping      after a save: wait for as many copies as are required
    group · opened · wanted   what an open store knows of its members; opening one; what callers name
    membership    the first term; adding, removing and seeding members
    promotion     another storage becomes the authority
    lag           how far each member is, for people
"""

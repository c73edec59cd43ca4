"""Checkpoints: saved by all ranks together, whole or not at all, checksummed, chained to parents, with a fallback.

    saver, restore   the two things that a session does; `whole_saver` and `sharded_saver` are the two kinds of state
    context          a session's ranks, directory and settings, which all of these share
    omissions        mistakes of a script that would lose work, found while it trains
    at_fault/        survivors save their state before a group is killed
    memory/          the writer process of a node, and the states in its memory
    state/           what is saved: gathered from objects, laid out in files, loaded again
    storage/         where checkpoints lie: a directory or an object store; without torch

Everything but the writer runs in the training thread. This package never overwrites a good checkpoint in place, never
deletes the last good one, and never decides when to save except at the intervals that the script asked for.
"""

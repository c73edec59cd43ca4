"""Checkpoints: saved by all ranks together, whole or not at all, checksummed, chained to parents, with a fallback.

    saver, sharded_saver, restore, omissions    what a session calls
    at_fault/                                   survivors save their state before a group is killed
    memory/                                     the writer process of a node, and the states in its memory
    state/                                      what is saved: gathered from objects, laid out in files, loaded again
    storage/                                    where checkpoints lie: a directory or an object store; without torch

Everything but the writer runs in the training thread. This package never overwrites a good checkpoint in place, never
deletes the last good one, and never decides when to save except at the intervals that the script asked for.
"""

"""Hangs and stragglers: detection, evidence, the verdict and its explanation.

`observer` -> `detector` (every node, deciding thread) -> `evidence` (its own thread; `collector` is its helper process)
-> `judge` (leader) -> `verdict` and `blame` (pure rules; `causes` is their closed list). `deadlines` and `stragglers`
learn from observations, `explain` reads evidence for people. No module ends a group: a verdict becomes a Failure.
"""

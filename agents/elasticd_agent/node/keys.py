"""Names of the agents' records in the store, and of runners in `ps`."""

from __future__ import annotations

ROOT = "/elasticd/v1"
SUBMISSIONS = f"{ROOT}/submissions/"
PLACEMENTS = f"{ROOT}/placements/"
RESULTS = f"{ROOT}/results/"
NODES = f"{ROOT}/nodes/"
CORDONS = f"{ROOT}/cordons/"
SCHEDULER = f"{ROOT}/scheduler"
CLEANUP = f"{ROOT}/cleanup"
"""Created under a lease by the scheduler while it removes the records of one ended job."""
CLOCK = f"{ROOT}/clock"
"""Seconds that schedulers have been active, one after the other, as decimal text: independent of any host's clock."""
SEQUENCE = f"{ROOT}/sequence"
"""The number of the last submission, as decimal text; incremented by compare-and-swap."""
RUNNER_COMM = b"elasticd-job"
"""A runner's name in `ps`."""

"""The names of daemons' records in the store, of a job's files in the state directory, and of runners in `ps`."""

from __future__ import annotations

ROOT = "/elasticd/v1"
SUBMISSIONS, PLACEMENTS, RESULTS = f"{ROOT}/submitted/", f"{ROOT}/placed/", f"{ROOT}/ended/"
NODES, CORDONS = f"{ROOT}/nodes/", f"{ROOT}/cordoned/"
SCHEDULER = f"{ROOT}/placer"
CLEANUP = f"{ROOT}/cleaning"
"""Held, under a lease, by the placer while it removes the records of one ended job."""
CLOCK = f"{ROOT}/clock"
"""Seconds that placers have been at work, one after the other, as decimal text: no host's time of day."""
SEQUENCE = f"{ROOT}/sequence"
"""The number of the last submission, as decimal text; counted up by compare-and-swap."""
RUNNER_COMM = b"elasticd-job"
"""What a runner goes by in `ps`."""

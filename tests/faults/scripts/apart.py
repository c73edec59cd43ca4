"""Rank 0 has not made the step in which the others wait for it. With the name of a file it makes the step once that is
there, and rank 1 then saves by itself."""

from __future__ import annotations

import sys
import time

import faults

import elasticd

session = elasticd.init()
if len(sys.argv) > 1:
    session.step()
    deadline = time.monotonic() + 60
    while session.rank == 0 and not (faults.WORK / sys.argv[1]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
elif session.rank == 0:
    time.sleep(3600)
session.step()
if session.rank == 1:
    time.sleep(5)
    faults.write("saved", "x")

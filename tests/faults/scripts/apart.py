"""Rank 0 has not made the step in which the others wait for it."""

from __future__ import annotations

import time

import elasticd

session = elasticd.init()
if session.rank == 0:
    time.sleep(3600)
session.step()

"""Exit codes of `elasticd run` and of runners: what the program that started them acts on."""

from __future__ import annotations

REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: the job itself is fine, a scheduler should start it again."""
INTERRUPTED = 128 + 2
"""Ended by SIGINT, as a shell reports it."""
TERMINATED = 128 + 15
"""Ended by SIGTERM, as a shell reports it: the job was cancelled, or its nodes were stopped."""

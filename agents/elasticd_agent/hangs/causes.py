"""The causes of hangs, a closed list: label of a metric, field of events, section of docs/hangs.md.

The rules that choose them are in `verdict` (stopped, zombie, store) and in `blame` (all others).
"""

from __future__ import annotations

ADVICE = {
    "stopped": "find what stopped it (a debugger, SIGSTOP, the batch system); SIGCONT resumes a stopped process",
    "zombie": "its main thread ended while other threads live on: look at its last log lines",
    "blocked": "look at what its innermost call waits for: a file, a pipe, a lock, another process; if this wait is "
    'intended, declare it: session.phase("eval") around it, or --hang-floor',
    "spinning": "the loop in its stack does not end; if it is only slow, raise --slow-ceiling",
    "gil": "a C extension keeps Python's lock: its stack shows the call",
    "missed_collective": "its path through the code has one collective less: a condition that differs between ranks",
    "mismatched_collectives": "the ranks call different collectives or sizes: compare the stacks and the recorder",
    "network": "all ranks wait in the same collective: look at links, NICs, switches between the nodes",
    "never_joined": "it never reached init_process_group: look at its log, its imports, its data",
    "exiting": "training was done; an exit handler or a thread keeps the process: see its stack",
    "store": "the process that hosts the round's store was stopped or starved",
    "everyone": "all ranks are blocked alike: look at what they share (a file system, a GPU driver, a service); if "
    'this wait is intended, declare it: session.phase("eval") around it, or --hang-floor',
}
"""Advice for a person, by cause."""

CAUSES = tuple(ADVICE)

DUMP_REASON = "requested by elasticd dump"
"""The reason for evidence without a suspicion."""

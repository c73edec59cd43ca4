"""The agent's word in a worker's beat, and the worker's last one.

A worker that has no beat, or one that makes no sense, hears nothing and has said nothing: that is no error here.
"""

from __future__ import annotations

from elasticd.errors import WireError
from elasticd.heartbeat import exit_report as last_words_of
from elasticd.heartbeat import record as beat
from elasticd_agent.model.messages import WorkerExitReport


def write_request(path: str, word: int) -> None:
    """Put `word` (beat.STOP, beat.HOLD, 0) there."""
    try:
        with beat.HeartbeatReader(path) as reader:
            reader.request(word)
    except (OSError, WireError):
        pass  # a worker without a beat; after STOP comes a signal, which is enough


def read_exit_report(path: str) -> WorkerExitReport | None:
    """What the worker's beat says of its end, None if it said nothing."""
    try:
        with beat.HeartbeatReader(path) as reader:
            words = reader.read().exit_report
    except (OSError, WireError):
        return None
    return None if words is None else exit_report_of(words)


def exit_report_of(words: last_words_of.ExitReport) -> WorkerExitReport:
    """The words as the agent's own."""
    return WorkerExitReport(
        "exception" if words.kind == "exception" else "exit", words.type, words.message, words.traceback, words.bases
    )

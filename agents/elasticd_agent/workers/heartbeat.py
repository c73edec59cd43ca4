"""The agent's word in a worker's beat, and the worker's last one.

A worker that has no beat, or one that makes no sense, hears nothing and has said nothing: that is no error here.
"""

from __future__ import annotations

from elasticd.errors import WireError
from elasticd.heartbeat import exit_report as last_words_of
from elasticd.heartbeat import record as beat
from elasticd_agent.model.messages import LastWords


def ask(path: str, word: int) -> None:
    """Put `word` (beat.STOP, beat.HOLD, 0) there."""
    try:
        with beat.BeatReader(path) as reader:
            reader.request(word)
    except (OSError, WireError):
        pass  # a worker without a beat; after STOP comes a signal, which is enough


def last_words(path: str) -> LastWords | None:
    """What the worker's beat says of its end, None if it said nothing."""
    try:
        with beat.BeatReader(path) as reader:
            words = reader.read().last_words
    except (OSError, WireError):
        return None
    return None if words is None else understood(words)


def understood(words: last_words_of.LastWords) -> LastWords:
    """The words as the agent's own."""
    return LastWords(
        "exception" if words.kind == "exception" else "exit", words.type, words.message, words.traceback, words.bases
    )

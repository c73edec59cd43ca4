"""From what runners say of their jobs' rounds: was this node set aside for failures of a job? Pure but for its memory.

It relies on the plan's own judgement: a slot is set aside in a Round when it was to blame again and again, without
progress or with a hang, while the job had others to go on with. A job that runs on this node alone blames nobody, since
it cannot tell the node from its script. What is set aside together counts once, however often it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Key = tuple[str, int]
MAX_CHARS = 1000
"""Of a sentence: it becomes part of the node's card, and a runner is its job's user's."""


class JobFailures:
    """One node's. A daemon that comes back has forgotten what it was told, so what it hears first is no news."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._counts: dict[Key, dict[int, int]] = {}

    def update(self, told: Mapping[Key, Mapping[str, Any]], adopted: Iterable[Key] = ()) -> list[str]:
        """`told`: what each runner here said last, of its status. A sentence for each time that is new."""
        self._counts = {key: times for key, times in self._counts.items() if key in told}
        sentences = []
        for key, said in told.items():
            now = _quarantine_counts(said.get("quarantined_slots"), self._node) if said.get("alone") is False else None
            if now is None:
                continue
            before = self._counts.get(key, now if key in set(adopted) else {})
            aside = sorted(slot for slot, times in now.items() if times > before.get(slot, 0))
            if aside:
                slots = f"slot{'s' * (len(aside) > 1)} {', '.join(map(str, aside))}"
                sentences.append(
                    f"job {key[0]}, round {said.get('round')} set aside {slots}: {said.get('reason', '')}"[:MAX_CHARS]
                )
            self._counts[key] = {**before, **{slot: max(times, before.get(slot, 0)) for slot, times in now.items()}}
        return sentences


def _quarantine_counts(benched: Any, node: str) -> dict[int, int] | None:
    """By slot of this node how often it was set aside; None if the runner, of another version, does not say it."""
    if not isinstance(benched, list):
        return None
    found = {}
    for one in benched:
        match one:
            case {"node": str(who), "slot": int(slot), "times": int(times)} if who == node and times > 0:
                found[slot] = times
    return found

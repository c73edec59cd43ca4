"""Which failures of jobs count against this node, from the status of the runners here.

The plan judges: a Round quarantines a slot that was the root cause repeatedly, without progress or with a hang, while
the job had other slots. A job on this node alone counts nothing, since the node cannot be told from the script. Slots
that are quarantined together count once, however often they are reported. A script can fail as it likes: one user's
jobs must not take the node from those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from elasticd_agent.model.phrases import plural

RunKey = tuple[str, int]
MAX_SENTENCE_CHARS = 1000
"""The limit of a sentence: it becomes part of the node status, and the runner belongs to the job's user."""


class JobFailures:
    """After the agent's restart the first report of an adopted runner is the baseline."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._counts: dict[RunKey, dict[int, int]] = {}
        self._last_user: int | None = None

    def update(
        self,
        statuses: Mapping[RunKey, Mapping[str, Any]],
        adopted: Iterable[RunKey] = (),
        uids: Mapping[RunKey, int | None] = MappingProxyType({}),
    ) -> list[str]:
        """`statuses`: the last one of each runner here; `uids` of all of them. A sentence for each new quarantine.

        While several users have jobs here, further ones of the user that had the last one are left out.
        """
        self._counts = {key: counts for key, counts in self._counts.items() if key in statuses}
        sentences = []
        for key, status in statuses.items():
            now = _quarantine_counts(status.get("quarantined_slots"), self._node)
            if now is None or status.get("alone") is not False:
                continue
            before = self._counts.get(key, now if key in set(adopted) else {})
            new = sorted(slot for slot, count in now.items() if count > before.get(slot, 0))
            user = uids.get(key)
            if new and not (user == self._last_user and len({*uids.values()}) > 1):
                self._last_user = user
                slots = f"{plural(len(new), 'slot')} {', '.join(map(str, new))}"
                reason = f"job {key[0]}, round {status.get('round')} quarantined {slots}: {status.get('reason', '')}"
                sentences.append(reason[:MAX_SENTENCE_CHARS])
            self._counts[key] = {**before, **{slot: max(count, before.get(slot, 0)) for slot, count in now.items()}}
        return sentences


def _quarantine_counts(quarantined: Any, node: str) -> dict[int, int] | None:
    """The number of quarantines of each slot of this node; None if the runner's version does not report it."""
    if not isinstance(quarantined, list):
        return None
    counts = {}
    for slot_record in quarantined:
        match slot_record:
            case {"node": str(name), "slot": int(slot), "times": int(count)} if name == node and count > 0:
                counts[slot] = count
    return counts

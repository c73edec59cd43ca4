"""Numbers in records that agents count through: who writes one of them must not stop every scheduler."""

from __future__ import annotations

import pytest

from elasticd.errors import WireError
from elasticd_agent.config.quantities import MAX_COUNT, MAX_SLOTS_PER_NODE
from elasticd_agent.model.codec import Document
from elasticd_daemon.records import NodeStatus, RunnerStatus, Submission


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (NodeStatus("n9", "i", MAX_SLOTS_PER_NODE), ""),
        (NodeStatus("n9", "i", MAX_SLOTS_PER_NODE + 1), "node 'n9': 4097 slots are not in 0..4096"),
        (NodeStatus("n9", "i", -1), "node 'n9': -1 slots are not in 0..4096"),
        (NodeStatus("n9", "i", 2, runners=(RunnerStatus("lm", 1, (), "running"),)), ""),
        (NodeStatus("n9", "i", 2, runners=(RunnerStatus("lm", 1, (-1,), "running"),)), "runner of 'lm': slots must be"),
        (
            NodeStatus("n9", "i", 2, runners=(RunnerStatus("lm", 1, (1, 1), "running"),)),
            "runner of 'lm': slots must be",
        ),
        (Submission("lm", 1, "{}", 1, MAX_COUNT, 1, MAX_COUNT), ""),
        (Submission("lm", 1, "{}", 1, 10**9, 1, 1), "submission of 'lm': invalid range of 1:1000000000 nodes"),
        (Submission("lm", 1, "{}", 1, 1, 10**9, 10**9), "invalid range of 1000000000:1000000000 slots"),
        (Submission("lm", 1, "{}", 1, 1, 2, 1), "invalid range of 2:1 slots"),
    ],
)
def test_counts_are_bounded(record: Document, why: str) -> None:
    text = record.to_json()
    if not why:
        assert type(record).from_json(text) == record
        return
    with pytest.raises(WireError, match=why.replace(".", r"\.")):
        type(record).from_json(text)

"""A process that runs the script ahead of its round: what its group passes and what it refuses."""

from __future__ import annotations

from typing import Any


def test_ddp_can_be_built_and_every_other_collective_is_refused(start: Any) -> None:
    (seen,) = start("newcomer.py", world_size=1, RANK="2", WORLD_SIZE="3", ELASTICD_NEWCOMER="1").results()
    assert seen["passed"] == []
    assert seen["sizes"] == [2, 3, True, 2, 3] and seen["is_left"]
    assert len(seen["refused"]) == 16
    for name, error in seen["refused"].items():
        assert "before session.run()" in error or "No backend type" in error, (name, error)  # torch 2.15: by itself

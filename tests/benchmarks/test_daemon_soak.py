"""benchmarks/daemon_soak.py in short: a dozen faults of agents, one after the other, each of its own kind.

What it promises is benchmarks/daemon_checker.py's to say. `make soak` draws hundreds of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.daemon_soak import soak

FAULTS = (
    "kill agent",
    "kill worker",
    "kill runner",
    "upgrade",
    "store restart",
    "pause agent",
    "kill both",
    "cancel",
    "drain",
    "kill node",
    "stop agent",
    "damaged file",
)


@pytest.mark.system
def test_agents_under_faults_keep_promises(tmp_path: Path) -> None:
    said: list[str] = []
    found = soak(tmp_path, FAULTS, nodes=3, seed=1, limit_s=60.0, say=said.append, steps=(40, 100), lasts_s=(0.5, 3.0))
    assert not found, "\n".join([*said, *found])
    assert [line.split(None, 1)[1] for line in said if line.split()[0].isdigit()]

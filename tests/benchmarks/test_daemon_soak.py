"""benchmarks/daemon_soak.py in short: a dozen faults of agents, one after the other, each of its own kind.

What it promises is benchmarks/daemon_checker.py's to say. `make soak` draws hundreds of them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.daemon_adversary import missing
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


def short_soak(work: Path, hostile: bool) -> None:
    said: list[str] = []
    faults = (*FAULTS, "poison", "poison", "poison") if hostile else FAULTS
    found = soak(work, faults, 3, 1, 200.0, said.append, steps=(40, 100), lasts_s=(0.5, 3.0), hostile=hostile)
    assert not found, "\n".join([*said, *found])
    assert [line.split(None, 1)[1] for line in said if line.split()[0].isdigit()]


@pytest.mark.system
def test_agents_under_faults_keep_promises(tmp_path: Path) -> None:
    short_soak(tmp_path, hostile=False)


@pytest.mark.system
@pytest.mark.timeout(400)
def test_agents_beside_an_adversary_keep_promises() -> None:
    if why := missing():
        pytest.skip(why)
    with TemporaryDirectory(prefix="elasticd-soak-") as work:  # pytest's own is closed to other users
        short_soak(Path(work), hostile=True)

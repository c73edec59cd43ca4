"""Where nothing is wrong nothing is said: a healthy run, and one that is slow in every way that there is.

Both are short here. By hand, at full length: ALERTING_HEALTHY_S=300 ALERTING_SLOW=1.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.alerting.conftest import Watched
from tests.alerting.pair import JOB
from tests.faults.job import Fault, until
from tests.hangs.situations import SCRIPTS, SESSION, slow

HEALTHY_S = float(os.environ.get("ALERTING_HEALTHY_S", "60"))
SLOW = float(os.environ.get("ALERTING_SLOW", "0.2"))
"""Of full length, which is a minute for the first step; the rules' times are divided accordingly."""


@pytest.mark.timeout(HEALTHY_S + 200)
def test_nothing_is_said_of_a_healthy_run(watched: Watched) -> None:
    nodes, watch = watched()
    begun = nodes.round()
    end = time.monotonic() + HEALTHY_S
    while time.monotonic() < end:
        assert not watch.heard, watch.told()
        time.sleep(0.5)
    assert nodes.round() == begun
    print(f"\n{HEALTHY_S:g} s, {max(nodes.n1.steps())[1]} steps, nothing said; still pending: {watch.alerts()}")


@pytest.mark.timeout(500 * SLOW + 300)
def test_nothing_is_said_of_a_job_that_is_only_slow(watched: Watched) -> None:
    """A long first step, a long evaluation, a long checkpoint, steps that take 20 times as long."""
    ways = slow(SLOW)
    faults = ways["a long first step"][0]
    faults += [Fault(0, 30, ways[way][0][0].what) for way in ("a long evaluation", "a long checkpoint write")]
    hiccups = ["--steps", "210", "--hiccup", f"{4 * SLOW:g}", "--pause", "0.05"]
    nodes, watch = watched(
        *hiccups, scale=1 / SLOW, faults=faults, script=SCRIPTS / SESSION, wait=False, hang_floor="5s"
    )
    ended = until(lambda: nodes.n1.job_events(JOB, "job_ended"), nodes.told, 400 * SLOW + 120)[0]
    assert ended["outcome"] == "succeeded", nodes.told()
    fired = (nodes.work / "fired").read_text().split()
    assert len(fired) == len(faults), f"{fired} of {faults}"
    # That leases are renewed slowly is true, and nothing a job does, of a machine that other tests keep busy; of the
    # fewer renewals in a shorter window a single slow one is enough.
    said = {n.name for n in watch.heard} - ({"ElasticdLeaseRenewalsSlow"} if SLOW < 1 else set())
    assert not said, watch.told()
    print(f"\n{' '.join(fired)} of {len(faults)} situations, rules' times divided by {1 / SLOW:g}: nothing said")

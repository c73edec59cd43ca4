"""SIGHUP to a real agent: what is wrong changes nothing, what counts counts at once, and what does not is said."""

from __future__ import annotations

import signal

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, lives, until


@pytest.mark.system
def test_a_reload_is_all_or_nothing_and_says_what_waits(node: MakeNode) -> None:
    n1 = node()
    n1.job("first", "plain.py", COLD, "sleep", workers=1)
    n1.start()
    workers = n1.workers("first")
    until(lambda: (n1.work / "ready-0").exists(), n1.told)

    n1.config.write_text(n1.config.read_text() + "worker = 3\n")
    n1.signal(signal.SIGHUP)
    said = n1.said("nothing was reloaded")
    assert said.endswith(f"{n1.config}: job[0].worker: is not a key; did you mean workers?")

    # A job may use the directory of this node's jobs and no other from now on; its slots are another matter.
    n1.settings |= {"limits": {"directories": [str(n1.work)]}, "slots": 3}
    n1.job("second", "plain.py", COLD, "sleep", workers=1)
    n1.job("outside", "plain.py", COLD, "sleep", workers=1, checkpoint_dir="/elsewhere")
    n1.write()
    n1.signal(signal.SIGHUP)
    n1.said(f"{n1.config}: job[2].checkpoint_dir: '/elsewhere' is not below one of this node's [limits] directories")
    n1.jobs.pop()
    n1.write()
    n1.signal(signal.SIGHUP)
    said = n1.said("SIGHUP: slots: 3 instead of 2 counts from the next start")
    assert 'limits.directories: ["/' in said
    assert "job: first, second instead of first from now on" in said
    assert lives(n1.workers("second", 2)[0])
    assert n1.workers("first") == workers
    assert lives(workers[0])

    # What is gone from the file goes on.
    n1.jobs.clear()
    n1.write()
    n1.signal(signal.SIGHUP)
    n1.said("job: none instead of first, second")
    assert lives(workers[0])
    assert n1.drain() == 0
    n1.assert_gone()

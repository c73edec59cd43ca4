"""What is told of a round: the numbers that others compare with."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elasticd.wire import Member, Round
from elasticd_agent.arguments import parse_run
from elasticd_agent.console import PlainConsole
from elasticd_agent.eventlog import NullEventLog
from elasticd_agent.metrics import Metrics
from elasticd_agent.outlet import Outlet
from elasticd_agent.story import JobStory


@pytest.mark.parametrize(("nodes", "workers", "here", "aim"), [(1, 4, 3, 4), (4, 2, 2, 8), (1, 2, 2, 2), (2, 1, 3, 3)])
def test_a_job_aims_at_all_of_its_nodes(nodes: int, workers: int, here: int, aim: int, tmp_path: Path) -> None:
    """`here` workers are there; nodes that have more slots than this one can make it more than was aimed at."""
    flags = f"--nnodes 1:{nodes} --nproc-per-node {workers} --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm"
    spec, policy, _ = parse_run([*flags.split(), "train.py"], {}, tmp_path)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    metrics, outlet = Metrics("lm", "a"), Outlet(nowhere)
    story = JobStory(spec, policy, "a", NullEventLog(), metrics, PlainConsole(outlet, "lm"), lambda number: None)
    story.round_published(Round(1, (Member("a", "x", tuple(range(here))),), cause="start"), time.monotonic())
    assert outlet.close()
    os.close(nowhere)
    served = metrics.render().decode()
    assert f'elasticd_world_size{{job_id="lm",node="a"}} {here}.0' in served
    assert f'elasticd_world_size_target{{job_id="lm",node="a"}} {aim}.0' in served

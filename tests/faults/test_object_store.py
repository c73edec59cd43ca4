"""Jobs whose checkpoints are in an object store, on nodes that share nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY, SCRIPTS, until
from tests.faults.nodes import Nodes
from tests.faults.test_save_at_failure import lose_rank_0s_node
from tests.faults.test_sharded import assert_each_sample_once, parameters, size_at, trained
from tests.s3_server import BUCKET, S3

pytestmark = pytest.mark.system


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    server = S3(tmp_path / "s3.log")
    yield server
    server.close()


def stored(s3: S3, cache: Path, **more: str) -> dict[str, Any]:
    """How a job is started that saves there; `cache` is the place of its node's copy."""
    environment = {**s3.environment, "ELASTICD_OBJECT_CACHE": str(cache), **more}
    return {"flags": ["--checkpoint-dir", f"s3://{BUCKET}/run"], "env": environment}


def test_everything_dies_and_another_node_goes_on(job: StartJob, s3: S3, tmp_path: Path) -> None:
    first = job("resume.py", "--steps", "100000", "--every", "10", **stored(s3, tmp_path / "a"))
    first.event("checkpoint_saved")
    first.kill(1, round=1)
    assert first.event("resumed", round=2)["reason"].partition("; ")[0].endswith("in memory")
    saved = until(lambda: first.events("checkpoint_saved", round=2)[1:], "a save of round 2")[-1]
    first.end()
    last = max(step for _, step in first.steps()) + 30
    again = job("resume.py", "--steps", str(last), **stored(s3, tmp_path / "b"))
    assert again.wait() == 0
    resumed = again.event("resumed", round=3)
    assert resumed["step"] >= saved["step"]
    assert "was not released by run" in again.err
    assert [step for _, step in again.steps()] == list(range(resumed["step"] + 1, last + 1))
    # Nobody has lost its copy, and a third run finds what the second has left.
    shutil.rmtree(tmp_path / "b")
    third = job("resume.py", "--steps", str(last + 5), **stored(s3, tmp_path / "b"))
    assert third.wait() == 0
    assert third.event("resumed", round=4)
    assert "was not released" not in third.err


@pytest.mark.timeout(300)
def test_the_store_is_away_for_a_while(job: StartJob, s3: S3, tmp_path: Path) -> None:
    """Saves fail, training goes on, a rank dies and the job resumes from memory; then it saves again."""
    run = job("resume.py", "--steps", "100000", "--every", "1s", **stored(s3, tmp_path / "a"))
    run.event("checkpoint_saved")
    s3.fault("cut", count=10**6)
    failed = run.event("checkpoint_failed")
    assert f"s3://{BUCKET}/run" in failed["reason"]
    run.kill(1, round=1)
    assert run.event("resumed", round=2)["reason"].partition("; ")[0].endswith("in memory")
    s3.fault("clear")
    assert run.event("checkpoint_saved", round=2)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"AWS_ACCESS_KEY_ID": "wrong"}, f"--checkpoint-dir: s3://{BUCKET}/run: access denied"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, f"--checkpoint-dir: s3://{BUCKET}/run: Could not connect"),
    ],
)
def test_a_store_that_cannot_be_used(
    job: StartJob, s3: S3, tmp_path: Path, change: dict[str, str], sentence: str
) -> None:
    """One sentence before anything is started."""
    run = job("resume.py", "--steps", "10", **stored(s3, tmp_path / "a", **change))
    assert run.wait() == 2
    assert sentence in run.err
    assert len(run.err.strip().splitlines()) == 1, run.err
    assert not run.events("group_started")


@pytest.mark.timeout(300)
def test_a_sharded_state_and_nodes_that_come_and_go(
    nodes: Callable[[str], Nodes], job: StartJob, s3: S3, tmp_path: Path
) -> None:
    """FSDP2 on 3, 2 and 3 nodes, each with a copy of its own."""
    steps = 120
    alone = ("sharded.py", "--kind", "whole", "--steps", str(steps), "--pause", "0")
    whole = job(*alone, workers="1", flags=["--checkpoint-dir", str(tmp_path / "whole")])
    job_nodes = nodes("2:3")
    train = ("sharded.py", "--kind", "fsdp", "--steps", str(steps), "--every", "5", "--pause", "0.1")
    agents = {name: job_nodes.agent(name, *train, warm=True, **stored(s3, tmp_path / name)) for name in "abc"}
    size_at(agents, 3)
    trained(agents, 8)
    lost = agents.pop("c")
    lost.end()
    size_at(agents, 2)
    trained(agents, 8)
    agents["d"] = job_nodes.agent("d", *train, warm=True, **stored(s3, tmp_path / "d"))
    size_at(agents, 3)
    assert [agent.wait(120) for agent in agents.values()] == [0] * 3
    assert whole.wait() == 0
    (ended,) = [agent for agent in agents.values() if (agent.work / "parameters").exists()]
    assert parameters(ended.work) == pytest.approx(parameters(whole.work), abs=1e-4)
    assert_each_sample_once([*agents.values(), lost], steps)


def test_last_step_outlives_the_loss_of_rank_0s_node(
    nodes: Callable[[str], Nodes], job: StartJob, s3: S3, tmp_path: Path
) -> None:
    """It is put by the node that is left."""
    lose_rank_0s_node(nodes("2:2"), stored(s3, tmp_path / "a"), stored(s3, tmp_path / "b"))
    again = job("donor.py", "--steps", "20", **stored(s3, tmp_path / "c"))
    assert again.wait() == 0
    assert [event["step"] for event in again.events("resumed")] == [12]


def test_under_torchrun(s3: S3, tmp_path: Path) -> None:
    """Rank 0 writes there itself, and the next job continues on another node."""
    (tmp_path / "faults.json").write_text("[]")
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])
    own = {"WORK": str(tmp_path), "PYTHONPATH": path, "ELASTICD_CHECKPOINT_DIR": f"s3://{BUCKET}/run"}
    for node, steps in (("a", "20"), ("b", "30")):
        environment = {**os.environ, **s3.environment, **own, "ELASTICD_OBJECT_CACHE": str(tmp_path / node)}
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        argv += [str(SCRIPTS / "resume.py"), "--steps", steps, "--every", "10"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert [int(line.split()[1]) for line in (tmp_path / "steps-0").read_text().splitlines()] == list(range(1, 31))

"""docs/migrating-from-torchrun.md: torchrun takes its commands, and a refused option names the replacement."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from elasticd_daemon.config import job_file as jobfile
from tests.config.test_torchrun_flags import theirs
from tests.docs.test_commands import typed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating-from-torchrun.md").read_text()
THEIRS = [
    shlex.split(line.replace("$N", "0"))
    for line in typed(PAGE)
    if re.match(r"(torchrun|python -m torch.distributed.run) ", line) and "…" not in line and "--help" not in line
]


def test_page_has_commands_of_torchrun() -> None:
    assert len(THEIRS) == 7


@pytest.mark.parametrize("words", THEIRS, ids=" ".join)
def test_torchrun_commands_parse(words: list[str]) -> None:
    parsed = theirs().parse_args(words[1:] if words[0] == "torchrun" else words[3:])
    assert parsed.training_script in ("train.py", "project.train")


def test_pod_variables_of_operator_are_ignored() -> None:
    (pod,) = [
        re.sub("[][,]", "", line).split() for line in PAGE.splitlines() if "elasticd" in line and "/workspace/" in line
    ]
    environ = {"PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job42-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "4"}
    environ |= {"MASTER_ADDR": "job42-master-0", "MASTER_PORT": "23456", "RANK": "3", "WORLD_SIZE": "32"}
    spec, _, _ = parse_run(pod[pod.index("run") + 1 :], environ, ROOT)
    assert (spec.rendezvous.min_nodes, spec.rendezvous.max_nodes, spec.master_port) == (2, 8, None)
    assert spec.rendezvous.endpoints == (("etcd", 2379),)
    elastic = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job42-worker-0:23456", "PET_MAX_RESTARTS": "3"}
    spec, policy, _ = parse_run(["--rdzv-id=job42", "train.py"], {**elastic, "PET_NNODES": "2:8"}, ROOT)
    assert (spec.rendezvous.backend, spec.rendezvous.max_nodes, policy.max_restarts) == ("c10d", 8, 3)


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        ("--nnodes=2:4 --node-rank=1 --master-addr=node-1 --master-port=29500", "--rdzv-backend c10d"),
        ("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=node-1", "needs --rdzv-id JOB"),
        ("--rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379", "write --rdzv-backend etcd"),
        ("--event-log-handler=x", "--event-log FILE"),
        ("--logs-specs=x", "--log-dir"),
        ("--nproc-per-node=xpu", "neither a number"),
    ],
)
def test_refused_options_name_the_replacement(argv: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_run([*argv.split(), "train.py"], {}, ROOT)
    assert instead in str(refused.value)


def test_job_file_of_page_parses() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert jobfile.read_job(text.encode(), "toml", "job.toml").id == "job42"

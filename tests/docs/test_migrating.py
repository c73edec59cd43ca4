"""docs/migrating-from-torchrun.md: every command on it is read by the parser of the program that it is typed for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from elasticd_daemon.cli import job_commands as verbs
from elasticd_daemon.config import job_file as jobfile
from tests.config.test_torchrun_flags import theirs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating-from-torchrun.md").read_text()
VARIABLES = {"$N": "0", "$SLURM_JOB_NUM_NODES": "4", "$SLURM_JOB_ID": "123", "$HEAD": "node-1"}


def commands() -> list[list[str]]:
    """Of tables, sentences and blocks: what begins with a program's name."""
    blocks = re.findall(r"^```(?:sh|yaml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE))
    found = []
    for line in [*lines, *spans]:
        line = re.sub(r"^command: \[(.*)\]$", lambda match: match[1].replace(",", " "), line)
        for name, value in VARIABLES.items():
            line = line.replace(name, value)
        words = shlex.split(line) if re.match(r"(srun|torchrun|elasticd|python|sbatch) ", line) else []
        if words[:1] == ["srun"]:
            words = words[next(at for at, word in enumerate(words) if word == "elasticd") :]
        if len(words) > 2 and "--help" not in words and not any("…" in word for word in words):
            found.append(words)
    return found


OURS = [words for words in commands() if words[:2] == ["elasticd", "run"] or words[1:3] == ["-m", "elasticd_agent"]]
THEIRS = [words for words in commands() if words[0] == "torchrun" or words[1:3] == ["-m", "torch.distributed.run"]]
ASKING = [words for words in commands() if words[0] == "elasticd" and words[1] != "run"]


def test_page_has_commands() -> None:
    assert (len(OURS), len(THEIRS), len(ASKING)) == (9, 7, 4)


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_elasticd_commands_parse(words: list[str]) -> None:
    spec, _, _ = parse_run(words[words.index("run") + 1 :], {}, ROOT)
    assert spec.entrypoint.endswith("train.py") or spec.entrypoint == "project.train"


@pytest.mark.parametrize("words", THEIRS, ids=" ".join)
def test_torchrun_commands_parse(words: list[str]) -> None:
    parsed = theirs().parse_args(words[1:] if words[0] == "torchrun" else words[3:])
    assert parsed.training_script in ("train.py", "project.train")


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_agent_commands_parse(words: list[str]) -> None:
    verbs.build_parser(words[1]).parse_args(words[2:])


def test_pod_variables_of_operator_are_ignored() -> None:
    (pod,) = [words for words in OURS if words[-1].startswith("/workspace/")]
    environ = {"PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job42-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "4"}
    environ |= {"MASTER_ADDR": "job42-master-0", "MASTER_PORT": "23456", "RANK": "3", "WORLD_SIZE": "32"}
    spec, _, _ = parse_run(pod[2:], environ, ROOT)
    assert (spec.rendezvous.min_nodes, spec.rendezvous.max_nodes, spec.master_port) == (2, 8, None)
    assert spec.rendezvous.endpoints == (("etcd", 2379),)
    elastic = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job42-worker-0:23456", "PET_MAX_RESTARTS": "3"}
    spec, policy, _ = parse_run(["--rdzv-id=job42", "train.py"], {**elastic, "PET_NNODES": "2:8"}, ROOT)
    assert (spec.rendezvous.backend, spec.rendezvous.max_nodes, policy.max_restarts) == ("c10d", 8, 3)


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        ("--nnodes=2:4 --node-rank=1 --master-addr=node-1 --master-port=29500", "--rdzv-backend c10d"),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node-1", "needs --rdzv-id JOB"),
        ("--rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379", "write --rdzv-backend etcd"),
        ("--numa-binding=node", "numactl"),
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

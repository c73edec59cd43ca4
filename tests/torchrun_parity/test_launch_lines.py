"""Launch lines that people have, from READMEs, operators and schedulers: the same ranks and exit code as torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from tests.etcd import free_ports
from tests.torchrun_parity.launching import DEADLINE_S

TORCHRUN = {"elasticd": "-m elasticd_agent run", "torch": "-m torch.distributed.run"}
"""What `torchrun` stands for on PATH, and what a line with `python -m torch.distributed.run` has after `python`."""
SRUN = """\
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node NODE=$node "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait $node; code=$(($? > code ? $? : code)); done
exit $code
"""
RANKS = """
import json, os, pathlib, sys, time
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK".split()
found = {name: int(os.environ[name]) for name in names} | {"node": os.environ["NODE"]}
MORE
out, until = pathlib.Path(os.environ["OUT"]), time.monotonic() + 60
(out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
while len(list(out.glob("rank-*.json"))) < found["WORLD_SIZE"] and time.monotonic() < until:
    time.sleep(0.01)  # the first one that fails ends the others
sys.exit(int(sys.argv[1]))
"""


class Node(NamedTuple):
    """One node's command line as a shell reads it, up to the script, and its environment beside the test's."""

    line: str
    environment: Mapping[str, str] = {}


Line = Callable[[int], Node]


def static(rank: int) -> Node:
    """The line of most READMEs."""
    return Node(
        f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr 127.0.0.1 --master-port PORT SCRIPT"
    )


def trainer_v2(rank: int) -> Node:
    """Kubeflow Trainer v2.3, runtime/framework/plugins/torch: everything by variables."""
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(rank)}
    return Node("torchrun SCRIPT", {**given, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "PORT"})


def operator_v1(rank: int) -> Node:
    """Kubeflow training operator v1.9, controller.v1/pytorch/envvar.go: a Master and a Worker."""
    theirs = {"PYTHONUNBUFFERED": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT", "WORLD_SIZE": "4"}
    return Node("python -m torch.distributed.run SCRIPT", {**trainer_v2(rank).environment, **theirs, "RANK": str(rank)})


def operator_v1_elastic(_: int) -> Node:
    """Its examples/pytorch/elastic/imagenet.yaml: Workers only, c10d, and no id."""
    given = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:PORT", "PET_NNODES": "2:3"}
    given |= {"PET_NPROC_PER_NODE": "2", "PET_RDZV_CONF": "last_call_timeout=1"}
    return Node("python -m torch.distributed.run SCRIPT", given)


def c10d(_: int) -> Node:
    """The documentation of torchrun, and torchx' dist.ddp on several nodes."""
    meet = "--rdzv-id=job42 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:PORT"
    return Node(f"torchrun --nnodes=2 --nproc-per-node=2 {meet} SCRIPT")


def skypilot(rank: int) -> Node:
    """docs.skypilot.co, distributed jobs."""
    line = """
        MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
        torchrun \\
        --nnodes=$SKYPILOT_NUM_NODES \\
        --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
        --node_rank=${SKYPILOT_NODE_RANK} \\
        --master_addr=$MASTER_ADDR \\
        --master_port=PORT \\
        SCRIPT"""
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank)}
    return Node(line, {**given, "SKYPILOT_NUM_GPUS_PER_NODE": "2"})


def slurm(_: int) -> Node:
    """The batch script of pytorch/examples, distributed/ddp-tutorial-series: one shell for both nodes."""
    line = """
        srun torchrun \\
        --nnodes 2 \\
        --nproc_per_node 2 \\
        --rdzv_id $RANDOM \\
        --rdzv_backend c10d \\
        --rdzv_endpoint 127.0.0.1:PORT \\
        SCRIPT"""
    return Node(line, {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"})


def ray(rank: int) -> Node:
    """A task on each node that calls torchrun, as Ray's own release tests do, with what Ray Train sets for a worker."""
    call = f"""import subprocess, sys
command = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--node_rank={rank}"]
command += ["--master_addr=127.0.0.1", "--master_port=PORT", *sys.argv[1:]]
sys.exit(subprocess.call(command))"""
    theirs = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
    theirs |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "RAY_JOB_ID": "01000000"}
    return Node(f"python -c '{call}' SCRIPT", theirs)


def ultralytics(_: int) -> Node:
    """ultralytics 8.4.190, utils/dist.py, generate_ddp_command: one node."""
    return Node("python -m torch.distributed.run --nproc_per_node 2 --master_port PORT SCRIPT")


def run(
    launcher: str, nodes: Sequence[Node], out: Path, code: int, more: str = ""
) -> tuple[list[int], list[dict[str, Any]]]:
    """All nodes, the last one first: exit codes by node, and what each rank says of itself, by `more` lines as well."""
    (out / "bin").mkdir(parents=True)
    for name, text in {
        "torchrun": f'exec {sys.executable} {TORCHRUN[launcher]} "$@"',
        "python": f'exec {sys.executable} "$@"',
        "srun": SRUN,
    }.items():
        (out / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (out / "bin" / name).chmod(0o755)
    (out / "ranks.py").write_text(RANKS.replace("MORE", more))
    port = str(free_ports(1)[0])
    processes: list[subprocess.Popen[str]] = []
    for number in reversed(range(len(nodes))):
        line, given = nodes[number]
        environment = {**os.environ, "OUT": str(out), "NODE": str(number), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{out / 'bin'}:{environment['PATH']}"
        environment |= {name: value.replace("PORT", port) for name, value in given.items()}
        line = line.replace("PORT", port).replace("SCRIPT", f"{out / 'ranks.py'} {code}")
        line = line.replace("-m torch.distributed.run", TORCHRUN[launcher])
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": out}
        processes.insert(0, subprocess.Popen(["bash", "-c", line], env=environment, start_new_session=True, **options))
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
    assert found, said
    return [process.returncode for process in processes], found


def test_nodes_with_ranks_are_in_their_order(tmp_path: Path) -> None:
    codes, ranks = run("elasticd", [static(0), static(1)], tmp_path, 0)
    assert codes == [0, 0]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["GROUP_RANK"], rank["node"]) for rank in ranks] == [
        (0, 0, 0, "0"),
        (1, 1, 0, "0"),
        (2, 0, 1, "1"),
        (3, 1, 1, "1"),
    ]


LINES = [
    *((line, 2, 0) for line in (static, c10d, trainer_v2, operator_v1, operator_v1_elastic, skypilot, ray)),
    *((line, 2, 3) for line in (static, c10d)),
    *((slurm, 1, 3), (ultralytics, 1, 0)),
]


@pytest.mark.system
@pytest.mark.parametrize(("line", "nodes", "code"), LINES)
def test_ranks_and_exit_code_are_torchruns(line: Line, nodes: int, code: int, tmp_path: Path) -> None:
    given = [line(number) for number in range(nodes)]
    ours, theirs = (run(name, given, tmp_path / name, code) for name in ("elasticd", "torch"))
    if line in (c10d, operator_v1_elastic, slurm):  # which node comes first is open
        for rank in (*ours[1], *theirs[1]):
            rank.pop("node")
    assert ours == theirs


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379 --rdzv-id=j", "write --rdzv-backend etcd, which"),
        ("--num_gpus=2", "--num_gpus is another launcher's option; write --nproc-per-node N, for each node"),
    ],
)
def test_line_of_another_launcher_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_run([*line.split(), "train.py"], {}, Path.cwd())

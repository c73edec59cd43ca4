"""Launch lines that people have, from READMEs, operators and schedulers: the same ranks and exit code as torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.etcd import free_ports
from tests.torchrun_parity.launching import DEADLINE_S

ELASTICD = ("-m", "elasticd_agent", "run")
TORCHRUN = ("-m", "torch.distributed.run")
RANKS = """
import json, os, pathlib, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
found = {name: int(os.environ[name]) for name in names} | {"node": os.environ["NODE"]}
pathlib.Path(os.environ["OUT"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
sys.exit(int(sys.argv[1]))
"""


class Node(NamedTuple):
    """One node's command line without the launcher, and its environment beside the test's."""

    line: str
    environment: Mapping[str, str] = {}


Line = Callable[[int], Node]


def static(rank: int) -> Node:
    """The line of most READMEs."""
    return Node(f"--nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr 127.0.0.1 --master-port PORT")


def operator(rank: int) -> Node:
    """Kubeflow Trainer's pods: everything by variables."""
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(rank)}
    return Node("", {**given, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "PORT"})


def run(launcher: Sequence[str], nodes: Sequence[Node], out: Path, code: int) -> tuple[list[int], list[dict[str, Any]]]:
    """All nodes, the last one first: exit codes by node, and what each rank says of itself."""
    out.mkdir()
    script = out / "ranks.py"
    script.write_text(RANKS)
    port = str(free_ports(1)[0])
    processes: dict[int, subprocess.Popen[str]] = {}
    for number in reversed(range(len(nodes))):
        line, given = nodes[number]
        environment = {**os.environ, "OUT": str(out), "NODE": str(number), "OMP_NUM_THREADS": "1"}
        environment |= {name: value.replace("PORT", port) for name, value in given.items()}
        command = [sys.executable, *launcher, *line.replace("PORT", port).split(), str(script), str(code)]
        processes[number] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out
        )
    try:
        said = [processes[number].communicate(timeout=DEADLINE_S)[0] for number in range(len(nodes))]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    found = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
    assert found, said
    return [processes[number].returncode for number in range(len(nodes))], found


@pytest.mark.parametrize("line", [static, pytest.param(operator, marks=pytest.mark.system)])
def test_nodes_with_ranks_are_in_their_order(line: Line, tmp_path: Path) -> None:
    nodes = [line(0), line(1)]
    codes, ranks = run(ELASTICD, nodes, tmp_path / "elasticd", 0)
    assert codes == [0, 0]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["GROUP_RANK"], rank["node"]) for rank in ranks] == [
        (0, 0, 0, "0"),
        (1, 1, 0, "0"),
        (2, 0, 1, "1"),
        (3, 1, 1, "1"),
    ]


@pytest.mark.system
@pytest.mark.parametrize("line", [static, operator])
@pytest.mark.parametrize("code", [0, 3])
def test_ranks_and_exit_code_are_torchruns(line: Line, code: int, tmp_path: Path) -> None:
    nodes = [line(0), line(1)]
    assert run(ELASTICD, nodes, tmp_path / "elasticd", code) == run(TORCHRUN, nodes, tmp_path / "torchrun", code)

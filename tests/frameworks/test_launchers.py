"""Lines that other tools generate, by the tools themselves: the same ranks and exit code as with torchrun inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrun_parity.test_launch_lines import Node, c10d, run


@pytest.mark.parametrize("network", ["--same_network", ""])
def test_accelerate_launch_on_two_nodes(network: str, tmp_path: Path) -> None:
    def options(rank: int) -> str:
        where = f"--main_process_ip 127.0.0.1 --main_process_port PORT {network}"
        return f"--multi_gpu --num_processes 4 --num_machines 2 --machine_rank {rank} {where} --mixed_precision no"

    ours = [Node(f'eval "$(python -m elasticd.integrations.accelerate {options(n)})"; torchrun SCRIPT') for n in (0, 1)]
    theirs = [Node(f"python -m accelerate.commands.launch {options(n)} SCRIPT") for n in (0, 1)]
    assert run("elasticd", ours, tmp_path / "elasticd", 0) == run("torch", theirs, tmp_path / "accelerate", 0)


@pytest.mark.parametrize("code", [0, 3])
def test_torchx_finds_it_as_torchrun(code: int, tmp_path: Path) -> None:
    """It starts both nodes here, and ends with 1 for any failure."""
    node = Node("torchx() { python -c 'from torchx.cli.main import main; main()' \"$@\"; }\n" + TORCHX)
    ours, theirs = (run(name, [node], tmp_path / name, code) for name in ("elasticd", "torch"))
    for rank in (*ours[1], *theirs[1]):
        del rank["node"]
    assert ours == theirs


TORCHX = """\
read -r script code <<< "SCRIPT"
torchx run -s local_cwd dist.ddp -j 2x2 --rdzv_port PORT --script "$script" -- $code
"""

SEEN = """
from lightning.fabric.plugins.environments import TorchElasticEnvironment
assert TorchElasticEnvironment.detect()
own = TorchElasticEnvironment()
own.validate_settings(num_devices=2, num_nodes=2)
found |= {"lightning": [own.world_size(), own.global_rank(), own.local_rank(), own.node_rank()]}
"""


def test_lightning_finds_torchrun(tmp_path: Path) -> None:
    """Its environment under torchrun; `validate_settings` is what `Trainer(devices=2, num_nodes=2)` asks."""
    ours, theirs = (run(name, [c10d(0), c10d(1)], tmp_path / name, 0, SEEN) for name in ("elasticd", "torch"))
    for rank in (*ours[1], *theirs[1]):
        del rank["node"]
    assert all(rank["lightning"][:2] == [4, rank["RANK"]] for rank in ours[1])
    assert ours == theirs

"""Sharded state: any way of sharding loads any other, bit for bit; plain DCP opens it; mistakes are one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elasticd.checkpointing.state import rank_differences, shard_plan, sharded, training_state
from elasticd.checkpointing.storage.manifest import METADATA, shard_name
from elasticd.errors import CheckpointCorrupt, UsageError
from elasticd.process_group import DefaultGroup
from elasticd_agent.cli.main import main

SAVED_AND_LOADED = [
    (("fsdp", 3), ("fsdp", 2)),
    (("hsdp", 4), ("fsdp", 3)),
    (("fsdp", 2), ("hsdp", 4)),
    (("fsdp", 2), ("whole", 1)),
    (("fsdp and tp", 4), ("fsdp", 2)),
    (("fsdp", 3), ("fsdp and tp", 4)),
    (("averaged", 2), ("averaged", 3)),
    (("zero", 2), ("zero", 3)),
    (("zero", 2), ("fsdp", 1)),
    (("ddp", 2), ("fsdp", 3)),
    (("ddp", 2), ("hsdp", 4)),
    (("ddp", 2), ("zero", 2)),
]
fsdp2 = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 trains on no CPU")
SLOW = [pytest.param(*each, marks=pytest.mark.system) for each in SAVED_AND_LOADED[1:]]


@fsdp2
@pytest.mark.parametrize(("saved", "loaded"), [SAVED_AND_LOADED[0], *SLOW])
def test_any_kind_loads_any_other(start: Any, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]) -> None:
    directory = str(tmp_path / "shared")
    groups = "zero" not in (saved[0], loaded[0])
    how = {"directory": directory, "two groups": groups}
    first = start("sharded.py", {**how, "kind": saved[0]}, world_size=saved[1]).results()
    second = start("sharded.py", {**how, "kind": loaded[0], "steps": 5}, world_size=loaded[1], round=2).results()
    expected = {**first[0]["after"], "rank": second[0]["before"]["rank"]}
    for each in second:
        assert each["resumed"]["step"] == 4
        assert each["before"] == expected | {key: each["before"][key] for key in ("rank",)}
        assert each["rates"] == pytest.approx([0.01 * 0.9**4, 0.02 * 0.9**4][: 2 if groups else 1])
    assert second[0]["after"] != second[0]["before"]


@fsdp2
def test_buffers_are_rank_0s_and_plain_dcp_opens_it(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "shared"
    first = start("sharded.py", {"directory": str(directory)}, world_size=2).results()
    dcp_to_torch_save(directory / "r1-s4", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert int(found["model"]["rank"]) == 0
    assert found["optimizer"]["param_groups"][1]["params"] == ["first.weight"]
    assert set(found["optimizer"]["state"]) == {key.split()[0] for key in first[0]["after"] if " " in key}
    own = {"model": {"first.weight": torch.zeros(10, 6)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(own, checkpoint_id=directory / "r1-s4")
    assert torch.equal(own["model"]["first.weight"], found["model"]["first.weight"])


MISTAKES = {
    "mesh": "is sharded over a mesh of ranks 1, but this job has 2: make the mesh with init_device_mesh()",
    "order": "attach(model=...): its class, parameters, settings, mesh or placements on rank 1 are not those of rank 0",
    "optimizer": "attach(optimizer=...): its class, parameters, settings, mesh or placements on rank 1 are not those",
    "settings": "attach(optimizer=...): its class, parameters, settings, mesh or placements on rank 1 are not those",
    "fsdp 1": "attach(model=...): FullyShardedDataParallel is not supported; shard it with fully_shard()",
    "twice": "attach(optimizer=...): its parameters are sharded already, and ZeroRedundancyOptimizer would divide them",
    "stranger": "attach(optimizer=...): it trains a parameter of no attached module",
    "container": "attach(optimizer=...): the state_dict() of Container is not state and param_groups, which alone",
    "whole": "Whole keeps 'count' in the state of optimizer, which is of no parameter: where the state is sharded",
    "plain": "model.norm.weight is not sharded, and on rank 1 it differs from rank 0's, which alone is saved",
    "local": "optimizer.state.first.weight.m is not sharded, and on rank 1 it differs from rank 0's",
}
ALONE = [each for each in MISTAKES if each != "optimizer"]


@pytest.mark.parametrize("mistake", ["optimizer", *(pytest.param(each, marks=pytest.mark.system) for each in ALONE)])
def test_mistake_is_one_sentence_at_the_first_call(start: Any, tmp_path: Path, mistake: str) -> None:
    job = start("sharded.py", {"directory": str(tmp_path / "shared"), "mistake": mistake}, world_size=2)
    assert job.codes() == [1, 1]
    assert MISTAKES[mistake] in job.ranks[1].errors()
    assert not [*(tmp_path / "shared").glob("r*")]


@pytest.mark.parametrize("module", ["deepspeed.runtime.engine", "megatron.core.transformer.module"])
def test_engine_of_another_package_is_refused(module: str) -> None:
    kind = type("Engine", (torch.nn.Module,), {"__module__": module})
    with pytest.raises(UsageError, match=f"Own is {module.partition('.')[0]}'s, which keeps a part of the state on"):
        training_state.as_attachable("model", type("Own", (kind,), {})())
    training_state.as_attachable("model", torch.nn.Linear(1, 1))


def test_unshared_directory_is_refused(start: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    own = [{"ELASTICD_CHECKPOINT_DIR": str(tmp_path / name), "GROUP_RANK": str(node)} for node, name in enumerate("ab")]
    job = start("sharded.py", {}, world_size=2, each_env=own, GROUP_WORLD_SIZE="2")
    assert job.codes() == [1, 1]
    for rank in job.ranks:
        assert "rank 1 does not see what rank 0 writes in" in rank.errors()


@fsdp2
def test_damaged_shard_is_skipped(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "shared"
    start("sharded.py", {"directory": str(directory)}, world_size=2).results()
    path = directory / "r1-s4" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["checkpoints", "verify", str(directory)]) == 1
    assert "r1-s4: __1_0.distcp does not match its checksum" in capsys.readouterr().out
    job = start("sharded.py", {"directory": str(directory), "steps": 2}, world_size=2, round=2)
    assert [each["resumed"]["step"] for each in job.results()] == [2, 2]
    assert "checkpoint_skipped" in job.ranks[0].kinds()
    assert main(["checkpoints", "list", str(directory)]) == 0
    assert "sharded" in capsys.readouterr().out
    (directory / "r2-s2" / "__1_0.distcp").unlink()
    assert main(["checkpoints", "list", str(directory)]) == 0
    assert "__1_0.distcp is missing" in capsys.readouterr().out


def test_every_kind_of_tensor_is_written_as_torch_writes_it(tmp_path: Path) -> None:
    base = torch.arange(48.0).view(6, 8)
    content = {
        "bfloat16": base.bfloat16(),
        "bool": base > 3,
        "complex": base.to(torch.complex64),
        "float8": base.to(torch.float8_e4m3fn),
        "number": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "part": base[2:4, 1:5],
        "parameter": torch.nn.Parameter(base.clone()),
        "value": [1, "text", None],
    }
    group = DefaultGroup(0, 1, torch.device("cpu"), created_by_join=False)
    plan = shard_plan.ShardPlan({"own": content}, group)
    fd = os.open(tmp_path / shard_name(0), os.O_WRONLY | os.O_CREAT)
    shard_plan.write_pieces(fd, 0, plan.content())
    assert os.fstat(fd).st_size == plan.sizes[0]
    os.close(fd)
    (tmp_path / METADATA).write_bytes(plan.metadata)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["own"]
    assert found.pop("value") == content.pop("value")
    for key, value in content.items():
        assert found[key].dtype == value.dtype
        one, other = (each.detach().reshape(-1).view(torch.uint8) for each in (found[key], value))
        assert torch.equal(one, other), key
    assert plan.try_use_state({"own": {**content, "value": [2, "other", None]}})
    assert not plan.try_use_state({"own": {**content, "value": [2, "longer text" * 20, None]}})
    assert not plan.try_use_state({"own": {**content, "number": torch.tensor([7])}})


def test_what_is_not_sharded_is_compared() -> None:
    """Parameters and what an optimizer keeps for them; not its counts, nor buffers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    attached = {"model": model, "optimizer": optimizer}
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    before = sharded.unsharded_digests(attached, 2)
    keys = [key for key, _ in model.named_parameters()]
    kept = [f"optimizer.state.{key}.{name}" for key in keys for name in ("exp_avg", "exp_avg_sq")]
    assert [*before] == [*(f"model.{key}" for key in keys), *kept]
    optimizer.state[model[1].bias]["step"] += 1
    model[1].running_mean.add_(1)
    assert sharded.unsharded_digests(attached, 2) == before
    optimizer.state[model[1].bias]["exp_avg"][2] += 1
    after = sharded.unsharded_digests(attached, 2)
    assert [key for key in before if before[key] != after[key]] == ["optimizer.state.1.bias.exp_avg"]
    (difference,) = rank_differences.find_differences([[{}, each, {}] for each in (before, before, after)])
    assert difference.sentence.startswith("optimizer.state.1.bias.exp_avg is not sharded, and on rank 2 it differs")
    assert not list(rank_differences.find_differences([[{}, before, {}]] * 2))


def test_values_of_a_state_are_what_is_no_tensor() -> None:
    state = {"step": 3, "momentum": torch.ones(2), "nested": {"mean": torch.ones(2), "count": 1}}
    assert sharded.non_tensor_values(state) == {"step": 3, "nested": {"count": 1}}


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointCorrupt, match=r"it refers to posix\.mkdir"):
        shard_plan.load_shards(shard_plan.open_on_disk(tmp_path), lambda metadata: {})
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("torch", "load"),
        ("this_is_imported", "x"),
    ],
)
def test_metadata_runs_no_code(module: str, name: str) -> None:
    """A directory may be another user's: its pickle gets the classes of DCP's metadata and nothing else."""
    content = b"\x80\x04" + _text(module) + _text(name) + b"\x93" + _text("x") + b"\x85R."
    with pytest.raises(CheckpointCorrupt, match=f"it refers to {module}.{name}"):
        shard_plan.read_metadata(content)


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()

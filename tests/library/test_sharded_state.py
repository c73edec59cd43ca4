"""What is saved in shards, and loaded from them, on one rank of two that exist in name only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticd.checkpointing.state import shard_plan, sharded, training_state
from elasticd.checkpointing.storage.manifest import METADATA, shard_name
from elasticd.errors import CheckpointError, UsageError
from elasticd.process_group import DefaultGroup

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.distributed.optim
ALONE = DefaultGroup(0, 1, torch.device("cpu"), created_by_join=False)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this rank, the second, and another one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def divide(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """By rows, without communication: distribute_tensor() has that from torch 2.7 on."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Its parameters are divided by rows, as fully_shard() divides them."""
    for part in module.modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, nn.Parameter(divide(parameter.detach(), mesh)))
    return module


def trained(module: nn.Module, make: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Its optimizer, after one step."""
    optimizer = make(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def save(state: dict[str, Any], folder: Path) -> None:
    plan = shard_plan.ShardPlan(state, ALONE)
    folder.mkdir(exist_ok=True)
    with open(folder / shard_name(0), "wb") as file:
        shard_plan.write_pieces(file.fileno(), 0, plan.content())
    (folder / METADATA).write_bytes(plan.metadata)


def load(attached: dict[str, Any], folder: Path) -> None:
    loaded = shard_plan.load_shards(
        shard_plan.open_on_disk(folder), lambda metadata: sharded.make_load_targets(attached, metadata)
    )
    sharded.load_attached(attached, loaded)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))


def equal(one: Any, other: Any) -> bool:
    """Of nested containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def objects(**options: Any) -> dict[str, Any]:
    model = net()
    return {"model": model, "optimizer": trained(model, **options)}


# --- which objects are sharded, and which cannot be -----------------------------------------------------------------


def test_modules_and_optimizers_are_in_shards_if_one_has_a_sharded_parameter(mesh: DeviceMesh) -> None:
    plain, other = nn.Linear(6, 4), object()
    assert sharded.names_saved_in_shards({"plain": plain, "other": other}) == frozenset()
    divided = shard(nn.Linear(6, 4), mesh)
    attached = {"plain": plain, "other": other, "divided": divided, "sgd": torch.optim.SGD(divided.parameters())}
    assert sharded.names_saved_in_shards(attached) == {"plain", "divided", "sgd"}
    assert sharded.names_saved_in_shards({"sgd": attached["sgd"], "other": other}) == {"sgd"}
    plain.register_buffer("own", divide(torch.ones(4), mesh))
    assert sharded.names_saved_in_shards({"plain": plain}) == {"plain"}


def zero(module: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def test_optimizer_that_divides_its_state_is_sharded(mesh: DeviceMesh) -> None:
    model = nn.Linear(6, 4)
    optimizer = zero(model)
    assert sharded.names_saved_in_shards({"model": model, "optimizer": optimizer}) == {"model", "optimizer"}
    sharded.check_mesh("optimizer", optimizer, 2)
    with pytest.raises(UsageError, match="its parameters are sharded already, and ZeroRedundancyOptimizer would"):
        sharded.check_mesh("optimizer", zero(shard(nn.Linear(6, 4), mesh)), 2)


def test_mesh_has_all_ranks(mesh: DeviceMesh) -> None:
    model = shard(nn.Linear(6, 4), mesh)
    sharded.check_mesh("model", model, 2)
    sharded.check_mesh("model", nn.Linear(6, 4), 3)
    with pytest.raises(UsageError, match=r"weight is sharded over a mesh of ranks 0, 1, but this job has 3: make the"):
        sharded.check_mesh("model", model, 3)


def test_slice_of_a_mesh_counts_as_the_whole(mesh: DeviceMesh) -> None:
    """As the parameters of tensor parallelism have it."""
    model = shard(nn.Linear(6, 4), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"])
    sharded.check_mesh("model", model, 2)


def test_fsdp_1_is_refused(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(UsageError, match="FullyShardedDataParallel is not supported; shard it with fully_shard"):
        sharded.check_mesh("model", model, 2)


def test_what_has_to_be_equal_on_all_ranks(mesh: DeviceMesh) -> None:
    """Names, shapes, types, placements, meshes, and an optimizer's class and settings; not the numbers."""

    def digests(model: nn.Module, make: Any = torch.optim.AdamW, **options: Any) -> dict[str, str]:
        return sharded.structure_digests({"model": model, "optimizer": make(model.parameters(), **options)})

    usual = digests(net(), lr=0.1)
    assert digests(net(), lr=0.1) == usual
    settings = digests(net(), lr=0.2), digests(net(), torch.optim.Adam, lr=0.1)
    assert [each["model"] == usual["model"] and each["optimizer"] != usual["optimizer"] for each in settings] == [
        True,
        True,
    ]
    others = [net().double(), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), shard(net(), mesh)]
    turned = shard(net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["dp"])
    assert len({usual["model"], *(digests(each, lr=0.1)["model"] for each in (*others, turned))}) == 5
    tensor_settings = [digests(net(), lr=torch.tensor(number)) for number in (0.1, 0.2)]
    assert tensor_settings[0] == tensor_settings[1]


# --- the state of a rank ----------------------------------------------------------------------------------------------


def test_buffers_and_groups_are_those_of_rank_0(mesh: DeviceMesh) -> None:
    model = nn.Sequential(shard(nn.Linear(6, 4), mesh), nn.BatchNorm1d(4))
    model.register_buffer("divided", divide(torch.ones(4), mesh))
    attached: dict[str, Any] = {"model": model, "optimizer": trained(model)}
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    first, second = (sharded.nested_state(attached, rank) for rank in (0, 1))
    assert first["model"].keys() - second["model"].keys() == buffers
    assert "divided" in second["model"]
    assert first["model"]["0.weight"] is model[0].weight
    assert [*second["optimizer"]] == ["state"]
    assert first["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys() == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip
    kept = attached["optimizer"].state[model[0].weight]["exp_avg"]
    assert first["optimizer"]["state"]["0.weight"]["exp_avg"] is kept


def test_parameter_of_two_modules_has_its_modules_name(mesh: DeviceMesh) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()])
    attached = {"one": one, "two": two, "unused": nn.Linear(2, 2), "sgd": both}
    named = sharded.nested_state(attached, 0)["sgd"]["param_groups"][0]["params"]
    assert named == ["one.weight", "one.bias", "two.weight", "two.bias"]
    with pytest.raises(UsageError, match=r"attach\(sgd=...\): it trains a parameter of no attached module"):
        sharded.nested_state({"one": one, "sgd": both}, 0)


def test_no_digest_of_what_is_sharded_or_managed_by_others(mesh: DeviceMesh) -> None:
    model = nn.Sequential(shard(nn.Linear(6, 4), mesh), nn.Linear(4, 1), nn.Linear(1, 1, bias=False))
    single = "model.2.weight"  # one number, but a parameter
    assert [*sharded.unsharded_digests({"model": model}, 2)] == ["model.1.weight", "model.1.bias", single]
    pair = nn.Linear(1, 2, bias=False)
    sgd = trained(pair, torch.optim.SGD, momentum=0.9)
    assert [*sharded.unsharded_digests({"pair": pair, "sgd": sgd}, 2)] == [
        "pair.weight",
        "sgd.state.weight.momentum_buffer",
    ]
    other = nn.Linear(6, 4)
    optimizer = zero(other)
    assert [*sharded.unsharded_digests({"other": other, "zero": optimizer}, 2)] == ["other.weight", "other.bias"]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_state_that_was_saved_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved, target = objects(lr=0.3), objects(lr=0.1)
    saved["model"](torch.randn(8, 6))
    save(sharded.nested_state(saved, 0), tmp_path)
    load(target, tmp_path)
    assert equal(training_state.collect_states(target), training_state.collect_states(saved))


def test_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    """And a setting that no optimizer has, such as a scheduler's, is kept."""
    model = nn.Linear(2, 2)
    attached: dict[str, Any] = {"model": model, "optimizer": trained(model)}
    save(sharded.nested_state(attached, 0), tmp_path)
    attached["optimizer"].param_groups[0]["initial_lr"] = 0.5
    load(attached, tmp_path)
    assert attached["optimizer"].param_groups[0]["initial_lr"] == 0.5
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(CheckpointError, match=r"another optimizer than SGD.* has no dampening, momentum"):
        load({"model": model, "optimizer": other}, tmp_path)


def test_optimizer_without_a_state_gets_all_of_it(tmp_path: Path) -> None:
    saved = objects()
    save(sharded.nested_state(saved, 0), tmp_path)
    model = net()
    target = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    load(target, tmp_path)
    assert equal(training_state.collect_states(target), training_state.collect_states(saved))


def test_optimizer_of_fewer_parameters_is_refused_and_its_modules_are_loaded(tmp_path: Path) -> None:
    """The state of a parameter that the optimizer does not train is not read."""
    saved = objects()
    save(sharded.nested_state(saved, 0), tmp_path)
    model = net()
    target = {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())}
    loaded = shard_plan.load_shards(
        shard_plan.open_on_disk(tmp_path), lambda metadata: sharded.make_load_targets(target, metadata)
    )
    assert loaded["optimizer"]["state"].keys() == {"0.weight", "0.bias"}
    with pytest.raises(CheckpointError, match="the checkpoint has 1 parameter groups and this optimizer 1, or they"):
        sharded.load_attached(target, loaded)


@pytest.mark.parametrize(
    ("saved", "target", "sentence"),
    [
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2), "model: the checkpoint holds nothing for bias"),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), "model: the checkpoint holds bias, which the module lacks"),
    ],
    ids=["lacks", "has more"],
)
def test_module_of_other_parameters_is_refused(
    tmp_path: Path, saved: nn.Module, target: nn.Module, sentence: str
) -> None:
    """Whatever another module of the checkpoint has."""
    both = {"other": nn.Linear(3, 3), "model": saved}
    save(sharded.nested_state(both, 0), tmp_path)
    with pytest.raises(CheckpointError, match=f"^{sentence}$"):
        load({**both, "model": target}, tmp_path)


def test_new_state_is_sharded_as_its_parameter_is(tmp_path: Path, mesh: DeviceMesh) -> None:
    """But a count, or what has another size, stays whole; on the device of its parameter."""
    saved = nn.Linear(6, 4)
    optimizer = trained(saved)
    optimizer.state[saved.weight]["odd"] = torch.ones(5)
    save(sharded.nested_state({"model": saved, "optimizer": optimizer}, 0), tmp_path)
    model = shard(nn.Linear(6, 4), mesh)
    made: list[Any] = []

    def targets(metadata: Any) -> Any:
        made.append(
            sharded.make_load_targets({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, metadata)
        )
        return {}

    shard_plan.load_shards(shard_plan.open_on_disk(tmp_path), targets)
    state = made[0]["optimizer"]["state"]["weight"]
    assert state["exp_avg"].placements == (Shard(0),) and state["exp_avg"].to_local().shape == (2, 6)
    assert not isinstance(state["odd"], DTensor) and state["odd"].shape == (5,)
    assert state["step"].shape == ()
    meta = nn.Linear(6, 4, device="meta")
    model = meta
    shard_plan.load_shards(shard_plan.open_on_disk(tmp_path), targets)
    state = made[1]["optimizer"]["state"]["weight"]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta", "odd": "meta",
    }  # fmt: skip


def test_whole_state_is_divided(mesh: DeviceMesh) -> None:
    """This rank gets the second half of the rows, and a count as it is; in memory of its own."""
    torch.manual_seed(1)
    saved = objects()
    whole = training_state.collect_states(saved)
    model = nn.Sequential(shard(nn.Linear(6, 4), mesh), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    divided = sharded.divide_whole_state({"model": model, "optimizer": optimizer}, whole)
    weight = divided["model"]["0.weight"]
    assert weight.placements == (Shard(0),)
    assert torch.equal(weight.to_local(), whole["model"]["0.weight"][2:])
    assert torch.equal(divided["model"]["1.running_var"], whole["model"]["1.running_var"])
    state = divided["optimizer"]["state"]
    assert [*state] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(state["0.weight"]["exp_avg"].to_local(), whole["optimizer"]["state"][0]["exp_avg"][2:])
    assert not isinstance(state["0.weight"]["step"], DTensor)
    assert divided["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    own = [weight.to_local(), state["0.weight"]["exp_avg"].to_local(), divided["model"]["1.running_var"]]
    assert training_state.storage_addresses(whole).isdisjoint(training_state.storage_addresses(own))


@pytest.mark.parametrize(
    ("saved", "target", "sentence"),
    [
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2), "model: the checkpoint lacks bias"),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), "model: the module lacks bias"),
    ],
    ids=["lacks", "has more"],
)
def test_whole_state_of_another_module_is_refused(saved: nn.Module, target: nn.Module, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{sentence}$"):
        sharded.divide_whole_state({"model": target}, {"model": saved.state_dict()})


def test_whole_state_of_more_parameters_is_divided_among_those_there_are() -> None:
    saved = nn.Linear(2, 2)
    whole = {"model": {"weight": saved.weight}, "optimizer": trained(saved, torch.optim.SGD, momentum=0.9).state_dict()}
    model = nn.Linear(2, 2, bias=False)
    divided = sharded.divide_whole_state({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, whole)
    assert [*divided["optimizer"]["state"]] == ["weight"]
    assert divided["optimizer"]["param_groups"][0]["params"] == ["weight"]


def test_part_of_an_optimizer_that_divides_its_state_is_loaded(mesh: DeviceMesh) -> None:
    """By the optimizer inside; its settings are also those of the one outside."""
    model = nn.Linear(6, 4)
    optimizer = zero(model)
    part = optimizer.optim
    for parameter in (each for group in part.param_groups for each in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    part.step()
    attached = {"model": model, "optimizer": optimizer}
    state = sharded.nested_state(attached, 0)
    (own,) = state["optimizer"]["state"].keys()
    assert state["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    state["optimizer"]["param_groups"][0]["lr"] = 0.7
    state["optimizer"]["state"][own] = {"momentum_buffer": torch.full_like(dict(model.named_parameters())[own], 5.0)}
    sharded.load_attached(attached, {"model": model.state_dict(), "optimizer": state["optimizer"]})
    assert optimizer.param_groups[0]["lr"] == part.param_groups[0]["lr"] == 0.7
    (loaded,) = part.state.values()
    assert bool((loaded["momentum_buffer"] == 5).all())

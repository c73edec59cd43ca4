"""The state of what a script attaches: what is saved of it, what is loaded into it, and what is said of the rest."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticd.checkpointing.state import training_state
from elasticd.errors import CheckpointError, UsageError
from tests.library.checkpoints import Kept

CPU = torch.device("cpu")


class OfAllRanks(Kept):
    def load_state_dicts(self, states: list[Any], rank: int, world_size: int) -> str:
        self.kept = {"states": states, "rank": rank, "world_size": world_size}
        return "they are averaged" if len(states) > 2 else ""


class Compiled(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


@pytest.fixture
def two_ranks() -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def stepped(module: nn.Module, make: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = make(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_afterwards_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with training_state.no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_objects_without_a_state_are_refused() -> None:
    half = type("Half", (), {"state_dict": dict})()
    with pytest.raises(UsageError, match=r"attach\(x=...\): Half has no load_state_dict\(\)\. What the script changes"):
        training_state.as_attachable("x", half)
    with pytest.raises(UsageError, match=r"object has no state_dict\(\) and no load_state_dict\(\)\."):
        training_state.as_attachable("x", object())
    with pytest.raises(UsageError, match=r"attach\(x=...\): Kept is a class: attach the object that"):
        training_state.as_attachable("x", Kept)
    with pytest.raises(UsageError, match=r"attach\(elasticd=...\): that name is elasticd's own part"):
        training_state.as_attachable("elasticd", Kept())
    kept = Kept()
    assert training_state.as_attachable("x", kept) is kept


def test_generator_is_attached_by_its_state() -> None:
    generator = torch.Generator()
    attached = training_state.as_attachable("it", generator)
    saved = attached.state_dict()
    drawn = torch.rand(3, generator=generator).tolist()
    attached.load_state_dict(saved)
    assert torch.rand(3, generator=generator).tolist() == drawn
    assert attached.load_state_dicts([{}, saved], 1, 3) == ""
    assert torch.rand(3, generator=generator).tolist() == drawn
    before = attached.state_dict()
    assert attached.load_state_dicts([saved], 1, 3) == "there is no state for rank 1, which keeps its own"
    assert attached.state_dict() == before


def test_wrappers_are_looked_through(two_ranks: None) -> None:
    module = nn.Linear(2, 2)
    parallel = DistributedDataParallel(module)
    for wrapped in (module, parallel, nn.DataParallel(module), Compiled(module), Compiled(parallel)):
        assert training_state.unwrap(wrapped) is module
    assert training_state.unwrap(DistributedDataParallel(Compiled(module))) is module
    for other in (nn.Sequential(Compiled(module)), Kept(), stepped(module)):
        assert training_state.unwrap(other) is other
    assert [training_state.find_ddp(each) for each in (parallel, Compiled(parallel))] == [parallel, parallel]
    assert [training_state.find_ddp(each) for each in (module, Compiled(module), Kept())] == [None] * 3


def test_equal_on_all_ranks_is_what_ddp_trains_and_what_its_optimizer_keeps(two_ranks: None) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].bias.requires_grad = False
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["3.bias"])
    parallel, alone = DistributedDataParallel(module), nn.Linear(2, 2)
    optimizers = [stepped(each, momentum=0.9) for each in (module, alone)]
    optimizers[0].state["count"] = 3
    attached = {"model": parallel, "alone": alone, "optimizer": optimizers[0], "other": optimizers[1], "kept": Kept()}
    trained = [module[0].weight, module[0].bias, module[1].weight, module[1].bias, module[2].weight, module[3].weight]
    kept = [optimizers[0].state[each]["momentum_buffer"] for each in trained]
    assert training_state.replicated_storages(attached, 2) == {each.data_ptr() for each in (*trained, *kept)}
    assert training_state.replicated_storages(attached, 3) == frozenset(), "its group is not of all ranks"

    class Own(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {}

    own = Own(module.parameters(), momentum=0.9)
    own.state.update(optimizers[0].state)
    assert training_state.replicated_storages({"model": parallel, "own": own}, 2) == {
        each.data_ptr() for each in trained
    }


def test_names_of_what_is_missing_and_not_used() -> None:
    state = {"a": {"x": 1}, "b": {"x": 2}, "elasticd": {}}
    targets = {"a": Kept(), "c": Kept(own=1), "d": Kept()}
    with pytest.raises(CheckpointError, match=r"^the checkpoint holds nothing for d, only a, b; attach under"):
        training_state.load_attached(targets, state, ["c"])
    assert targets["a"].kept == {}
    assert training_state.load_attached(targets, state, ["c", "d"]) == [
        "the checkpoint holds nothing for c, which is optional and stays as it is",
        "the checkpoint holds nothing for d, which is optional and stays as it is",
        "nothing is attached as b: that part of the checkpoint was not used",
    ]
    assert (targets["a"].kept, targets["c"].kept) == ({"x": 1}, {"own": 1})


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_objects_get_copies_of_what_is_mapped(is_mapped: bool, sparse: bool) -> None:
    weight = torch.eye(3)
    saved = {"it": {"w": weight, **({"s": torch.eye(2).to_sparse()} if sparse else {})}}
    target = Kept()
    training_state.load_attached({"it": target}, saved, (), lambda: () if is_mapped else {weight.data_ptr()})
    assert torch.equal(target.kept["w"], weight)
    assert (target.kept["w"] is weight) == (not is_mapped and not sparse)


def test_module_that_keeps_what_it_loads_gets_a_copy() -> None:
    class Keeping(nn.Linear):
        def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
            self.weight.data, self.bias.data = state["weight"], state["bias"]

    saved, target, copied = nn.Linear(2, 2).state_dict(), Keeping(2, 2), nn.Linear(2, 2)
    before = copied.weight.data_ptr()
    training_state.load_attached({"it": target, "other": copied}, {"it": saved, "other": saved})
    assert torch.equal(target.weight, saved["weight"]) and torch.equal(copied.weight, saved["weight"])
    assert training_state.storage_addresses(target.state_dict()).isdisjoint(training_state.storage_addresses(saved))
    assert copied.weight.data_ptr() == before


def test_optimizer_keeps_its_memory_or_gets_new() -> None:
    """The momentum that it has gets the numbers; what it lacks, or has in another type, is new memory."""
    saved = stepped(nn.Linear(2, 2), momentum=0.9).state_dict()
    for kind in ("same", "double", "none"):
        module = nn.Linear(2, 2)
        target = stepped(module, momentum=0.9) if kind != "none" else torch.optim.SGD(module.parameters(), momentum=0.9)
        if kind == "double":
            target.state[module.weight]["momentum_buffer"] = torch.zeros(2, 2, dtype=torch.float64)
        before = target.state[module.weight].get("momentum_buffer")
        training_state.load_attached({"it": target}, {"it": saved})
        now = target.state[module.weight]["momentum_buffer"]
        assert torch.equal(now, torch.ones(2, 2)) and now.dtype == torch.float32
        assert (before is not None and before.data_ptr() == now.data_ptr()) == (kind == "same")
        assert training_state.storage_addresses(target.state).isdisjoint(training_state.storage_addresses(saved))


def test_optimizer_whose_tensors_share_memory_gets_a_copy_in_which_they_do() -> None:
    module = nn.Linear(2, 2)
    optimizer = stepped(module, momentum=0.9)
    saved = optimizer.state_dict()
    saved["state"][0]["again"] = saved["state"][0]["momentum_buffer"]
    training_state.load_attached({"it": optimizer}, {"it": saved})
    state = optimizer.state[module.weight]
    assert state["again"].data_ptr() == state["momentum_buffer"].data_ptr()
    assert training_state.storage_addresses(optimizer.state).isdisjoint(training_state.storage_addresses(saved))


class Outer(torch.optim.Optimizer):
    """Has no state of its own, and that of another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, with_init: bool) -> None:
        self.inner = inner
        if with_init:
            super().__init__(inner.param_groups, {})

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("with_init", [True, False])
def test_optimizer_inside_another_one_gets_copies(with_init: bool) -> None:
    module = nn.Linear(2, 2)
    target = Outer(stepped(module, momentum=0.5), with_init)
    saved = stepped(nn.Linear(2, 2), momentum=0.9).state_dict()
    training_state.load_attached({"it": target}, {"it": saved})
    assert torch.equal(target.inner.state[module.weight]["momentum_buffer"], torch.ones(2, 2))
    kept = training_state.storage_addresses(target.inner.state)
    assert kept and kept.isdisjoint(training_state.storage_addresses(saved))


def test_state_of_another_optimizer_is_refused() -> None:
    adam = stepped(nn.Linear(2, 2), torch.optim.Adam).state_dict()
    with pytest.raises(CheckpointError) as raised:
        training_state.load_attached({"it": torch.optim.SGD(nn.Linear(2, 2).parameters())}, {"it": copy.deepcopy(adam)})
    assert str(raised.value).startswith(
        "the checkpoint has the state of another optimizer than SGD, which keeps exp_avg, exp_avg_sq, step, and has "
        "no dampening, momentum: restore into"
    )
    target = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointError, match="of another optimizer than SGD, and has no dampening, momentum"):
        training_state.load_attached({"it": target}, {"it": {**adam, "state": {}}})
    scheduled = torch.optim.SGD(nn.Linear(2, 2).parameters())
    scheduled.param_groups[0]["initial_lr"] = 1.0  # a scheduler's
    training_state.load_attached({"it": scheduled}, {"it": torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()})


def test_names_of_a_part_that_was_compiled_are_those_without() -> None:
    module = nn.Sequential(Compiled(nn.BatchNorm1d(2)))
    saved = training_state.collect_states({"it": module, "kept": Kept(**{"_orig_mod.x": 1})})
    assert "0.weight" in saved["it"] and "0._orig_mod.weight" not in saved["it"]
    assert "0" in saved["it"]._metadata
    assert saved["kept"] == {"_orig_mod.x": 1}
    assert training_state.with_compiled_keys(saved["it"], module).keys() == module.state_dict().keys()
    plain = nn.Sequential(nn.BatchNorm1d(2))
    assert training_state.with_compiled_keys(saved["it"], plain) is saved["it"]
    assert training_state.with_compiled_keys(saved["it"], Kept()) is saved["it"]
    without = OrderedDict(saved["it"])  # and without the versions of modules
    assert not hasattr(training_state.with_compiled_keys(without, module), "_metadata")


def test_each_rank_gets_its_state() -> None:
    states = {"it": [{"n": 0}, {"n": 1}], "unused": [{}]}
    target = Kept()
    assert training_state.load_per_rank({"it": target}, states, 1, 2, ()) == [
        "nothing is attached per rank as unused: that part of the checkpoint was not used"
    ]
    assert target.kept == {"n": 1} and target.kept is not states["it"][1]
    assert training_state.load_per_rank({"new": target}, {}, 1, 2, ["new"]) == [
        "the checkpoint holds nothing for new, which is optional and stays as it is"
    ]
    with pytest.raises(CheckpointError, match="the checkpoint holds no state of each rank for new; attach under the"):
        training_state.load_per_rank({"new": target}, {}, 1, 2, ["other"])


@pytest.mark.parametrize(("saved", "notes"), [(2, []), (3, ["it: they are averaged"])])
def test_states_of_another_number_of_ranks(saved: int, notes: list[str]) -> None:
    states = {"it": [{"n": number} for number in range(saved)]}
    target = OfAllRanks()
    assert training_state.load_per_rank({"it": target}, states, 1, 4, ["it"]) == notes
    assert target.kept == {"states": states["it"], "rank": 1, "world_size": 4}
    with pytest.raises(
        CheckpointError, match=f"it was saved by {saved} ranks, and now there are 4: give Kept a method"
    ):
        training_state.load_per_rank({"it": Kept()}, states, 1, 4, ())


def test_numpy_stream_is_saved_and_restored_where_numpy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    try:
        state = training_state.random_state(CPU)
        drawn = numpy.random.rand(3).tolist()
        assert training_state.set_random_state(state, CPU) == []
        assert numpy.random.rand(3).tolist() == drawn
        monkeypatch.delitem(sys.modules, "numpy")
        assert "numpy" not in training_state.random_state(CPU)
        assert training_state.set_random_state(state, CPU) == [
            "numpy's random state was saved, but numpy is not imported here"
        ]
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        numpy.random.set_state(before[2])

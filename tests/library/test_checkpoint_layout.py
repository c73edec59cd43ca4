"""The layout of state.pt: what several processes copy into one file is what one process writes, and torch loads it."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from typing import Any

import pytest
import torch

from elasticd.checkpointing.state.layout import Layout, load_mapped, write_at, write_packed
from elasticd.checkpointing.state.rank_differences import plain_digest

WEIGHT = torch.arange(30_000.0).reshape(100, 300)
STATES: dict[str, dict[str, Any]] = {
    "no tensor": {"a": [1, None, "x", (2.5, True)]},
    "one tensor": {"w": torch.ones(3)},
    "views of one memory": {"w": WEIGHT, "transposed": WEIGHT.t(), "row": WEIGHT[3]},
    "an empty tensor between others": {"a": torch.ones(2), "e": torch.empty(0), "b": torch.zeros(5)},
    "a parameter and small types": {"p": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), "n": torch.tensor(3)},
    "a sparse tensor": {"s": torch.eye(4).to_sparse()},
    "many tensors": {str(number): torch.full((number,), float(number)) for number in range(300)},
}


def filled(layout: Layout, shares: int, packed: bool) -> int:
    fd = os.memfd_create("layout")
    for share in range(shares):
        layout.copy_shared(functools.partial(write_at, fd), share, shares)
    if packed:
        write_packed(fd, layout.pack_unshared(1 << 30))
    else:
        layout.copy_unshared(fd)
    os.ftruncate(fd, layout.bytes)
    return fd


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", STATES)
def test_copied_file_is_the_written_file(kind: str, shared: bool, shares: int, packed: bool) -> None:
    state = STATES[kind]
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in dense) if shared else frozenset()
    layout = Layout(state, addresses)
    written = io.BytesIO()
    layout.write(written.write)
    fd = filled(layout, shares, packed)
    try:
        # Between the records is padding, which a copy leaves as it finds it: zeros in a new file.
        assert os.pread(fd, 1 << 30, 0) == written.getvalue()
        assert len(written.getvalue()) == layout.bytes
        for loaded in (load_mapped(fd), torch.load(io.BytesIO(written.getvalue()), weights_only=True)):
            assert loaded.keys() == state.keys()
            for name, value in state.items():
                same = torch.equal(loaded[name].to_dense(), value.to_dense()) if tensors else loaded[name] == value
                assert same, name
    finally:
        os.close(fd)


def test_views_still_share_memory_after_load() -> None:
    layout = Layout(STATES["views of one memory"])
    fd = filled(layout, 1, packed=False)
    loaded = load_mapped(fd)
    os.close(fd)
    loaded["w"][3] = 7.0
    assert bool((loaded["row"] == 7.0).all())


def test_torch_computes_no_offsets() -> None:
    """Torch's own writer leaves other distances between records, and tensors would be read from the wrong places."""
    config = pytest.importorskip("torch.utils.serialization", reason="torch before 2.7 has no such setting").config
    state = STATES["many tensors"]
    fd = filled(Layout(state), 1, packed=False)
    with config.patch({"load.calculate_storage_offsets": True}):
        loaded = load_mapped(fd)
    os.close(fd)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_archive_is_a_zip_file() -> None:
    written = io.BytesIO()
    Layout(STATES["one tensor"]).write(written.write)
    names = zipfile.ZipFile(written).namelist()
    assert names[0] == "archive/data/0" and {"archive/data.pkl", "archive/version"} <= set(names)


def test_pickle_does_not_move_the_tensors() -> None:
    """A number that grows from save to save must not make every page of the file another one."""
    first, second = (Layout({"w": WEIGHT, "step": step}, frozenset([WEIGHT.data_ptr()])) for step in (1, 10**400))
    assert first.bytes != second.bytes
    assert first.shared_digest == second.shared_digest


def test_other_names_order_or_shapes_have_another_digest() -> None:
    """Ranks whose objects have no stable order must not copy one tensor over another of the same size."""
    a, b, wide = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(6, dtype=torch.float64)
    shared = frozenset(tensor.data_ptr() for tensor in (a, b, wide))
    states = [{"a": a, "b": b}, {"b": b, "a": a}, {"a": b, "c": a}, {"a": a, "b": b.t()}, {"a": a, "b": wide}]
    assert len({Layout(state, shared).shared_digest for state in states}) == len(states)


@pytest.mark.parametrize("number", [0, 150, 699])
def test_any_tensor_that_differs_is_found_at_some_save(number: int) -> None:
    """An embedding may be the same at its beginning, and ranks may train one layer of many apart."""
    states = [[torch.zeros(99, 9) for _ in range(700)] for _ in range(2)]
    states[1][number][49] = 1.0

    def digest_of(state: list[torch.Tensor], save: int) -> str:
        return Layout({"w": state}, frozenset(each.data_ptr() for each in state), save=save).shared_digest

    differ = [digest_of(states[0], save) != digest_of(states[1], save) for save in range(1, 4)]
    assert sum(differ) == 1


def test_objects_without_a_stable_order_do_not_differ() -> None:
    assert plain_digest({"a": {"k": 1, "j": {3, 1, 2}}, "b": 2}) == plain_digest(
        {"b": 2, "a": {"j": {2, 3, 1}, "k": 1}}
    )
    assert plain_digest({"a": [1, 2]}) != plain_digest({"a": [2, 1]})


def test_large_own_part_is_not_packed() -> None:
    layout = Layout({"w": WEIGHT})
    _, _, content = layout.pack_unshared().partition(b"\n")
    assert layout.pack_unshared(len(content)) and layout.pack_unshared(len(content) - 1) == b""

"""A rank's part of a sharded state that is saved at a fault, where other ranks hold the same shards (HSDP).

What a rank writes at a save, each of its replicas can write as well: at a fault the survivors copy their own files and
those of dead ranks into the memory of their nodes. Together they hold a whole state if one rank of each set of replicas
survives and all have committed the same step; else the state of the last save is used.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elasticd.checkpointing import shard_plan, sharded
from elasticd.checkpointing.commit_record import local
from elasticd.checkpointing.layout import Layout
from elasticd.checkpointing.manifest import STATE
from elasticd.checkpointing.shard_plan import ShardPlan
from elasticd.errors import CheckpointError

Content = Callable[[], Iterator[bytes | memoryview]]
_OTHER_PLAN = "the optimizer has other tensors or groups than at the last plan of a save"


class ShardDonor:
    """Made on the training thread when a plan is: FSDP2 replaces parameters in a module during its passes, so that only
    the tensors of that moment are used at a fault.
    """

    def __init__(self, plan: ShardPlan, objects: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
        from torch.optim import Optimizer

        self._plan, self.names = plan, list(objects)
        self.replicas = plan.replicas
        nested = sharded.gather(objects, 0)
        self._flat, paths = flatten_state_dict(nested)
        self._flatten = flatten_state_dict
        self._optimizers = {name: obj for name, obj in objects.items() if isinstance(obj, Optimizer)}
        self._parameters = {
            name: [group["params"] for group in nested[name][sharded.GROUPS]] for name in self._optimizers
        }
        self.unrecorded = next((key for key, path in paths.items() if self._is_unrecorded(key, path)), "")
        """A value that may be another one at the fault than at the plan, such as a number; "" if there is none."""

    def _is_unrecorded(self, key: str, path: tuple[Any, ...]) -> bool:
        if path[0] in self._optimizers and path[1] == sharded.GROUPS:
            return False
        own = any("_extra_state" in str(part) for part in path[1:])  # torch's name for what get_extra_state() returns
        return own or not hasattr(self._flat[key], "data_ptr")

    def parameters(self) -> Iterator[Any]:
        """This rank's parts of all parameters, as `Fingerprint` takes them."""
        from torch.nn import Parameter

        yield from (local(each) for each in self._flat.values() if isinstance(each, Parameter))

    def files(
        self, groups: list[list[dict[str, Any]]], buffers: Mapping[tuple[str, str], Any], layout: Layout
    ) -> dict[str, tuple[int, Content]]:
        """Size and content of each file that this rank can write, its own first.

        `groups` are the optimizers' and `buffers` the modules' as of the commit; `layout` is of state.pt. Raises
        CheckpointError if an optimizer has other tensors than at the time of the plan.
        """
        known = {id(each) for each in self._flat.values()}
        for obj in self._optimizers.values():
            held = [*obj.state, *(each for values in obj.state.values() for each in values.values())]
            if any(id(each) not in known for each in held if hasattr(each, "data_ptr")):
                raise CheckpointError(_OTHER_PLAN)
        if list(map(len, self._parameters.values())) != list(map(len, groups)):
            raise CheckpointError(_OTHER_PLAN)
        flat = dict(self._flat)
        for (name, names), of_optimizer in zip(self._parameters.items(), groups, strict=True):
            named = [{**group, "params": each} for group, each in zip(of_optimizer, names, strict=True)]
            flat |= self._flatten({name: {sharded.GROUPS: named}})[0]
        flat |= {f"{name}.{key}": value for (name, key), value in buffers.items()}
        found: dict[str, tuple[int, Content]] = {}
        for rank in self.replicas:
            content = functools.partial(self._plan.content_of, rank, flat)
            found[shard_plan.file_name(rank)] = (self._plan.sizes[rank], content)
        if 0 in self.replicas:
            found[shard_plan.METADATA] = (len(self._plan.metadata), lambda: iter([self._plan.metadata]))
            found[STATE] = (layout.bytes, lambda: iter([_bytes_of(layout)]))
        return found


def _bytes_of(layout: Layout) -> memoryview:
    small = io.BytesIO()
    layout.write(small.write)
    return small.getbuffer()

"""Changes that a script makes after `session.step()` and before the next step begins.

It belongs to the step that has ended, and what `session.step()` has saved lacks it: a scheduler that steps there is one
step behind after each restart. Only the end of an epoch is different: the cursor is there, so a resumed run does again
what follows the loop over its batches.

A step begins where its batch is asked for. Where nothing attached is asked, it begins at the optimizer's step at the
latest, and what changes before that may also belong to the new step.

At most steps a few tensors are looked at. All of them are where much depends on it: at steps that are saved, at the end
of an epoch, and in the first steps.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticd.checkpointing.at_fault import step_files
from elasticd.checkpointing.at_fault.step_record import PIECE_BYTES
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.training_state import RandomState, local_part
from elasticd.errors import CheckpointRefused, Reason
from elasticd.sampler import samplers_of

if TYPE_CHECKING:
    from elasticd.checkpointing.at_fault.donor import Donor

STEPS_BEFORE_REFUSAL = 3
"""The first steps, after which a late change is an error; later ones have cost too much work."""
MAX_LOOK_S = 20e-6
"""The longest look at an object of the script's own. One that takes longer is looked at in LOOKS_AT_SLOW_OBJECTS
only."""
LOOKS_AT_SLOW_OBJECTS = 8
_INTEGRATIONS_PREFIX = "elasticd.integrations."
"""The modules in which the attached state of a framework's loop is made, which does again what a fault kept it from."""
_SAMPLED_PIECE_BYTES = 1024
"""The bytes from the beginning, the middle and the end of a parameter."""
ReadState = Callable[[], Any]


class BetweenSteps:
    """The time of a session between `session.step()` and the beginning of the next step."""

    def __init__(self, attached: Mapping[str, Any], donor: Donor, device: torch.device, first_step: int) -> None:
        """`first_step`: the step from which this run continues. Step 1 may be saved before any change can be seen."""
        self._changes, self._donor, self._first_step = LateChanges(attached), donor, first_step
        self._step = self._count = 0
        self._in_a_row = 0
        """Steps after which something has changed."""
        self._was_save_changed = self._must_save_again = False
        """The last step that was saved has been changed afterwards; it has to be saved again."""
        self.changed: list[str] = []
        self.has_begun = True
        """The next step."""
        self._ends_epoch = self.is_saved = False
        self._device = device
        self._random_state: RandomState | None = None
        """At the end of an epoch: what follows is repeated by a run that resumes there."""

    def commit(self, step: int, is_saved: bool, ends_epoch: bool) -> None:
        self._step, self.is_saved = step, is_saved
        self._count += 1
        is_early = self._count <= STEPS_BEFORE_REFUSAL or self._count & (self._count - 1) == 0
        self._changes.commit(is_saved or ends_epoch or is_early)
        self._ends_epoch = ends_epoch
        self._random_state = training_state.random_state(self._device) if self._ends_epoch else None
        self.has_begun = False

    def on_epoch_end(self) -> None:
        """The step before was an epoch's last one, which is known only now."""
        self._ends_epoch = True

    def on_save(self, is_next_epoch: bool) -> None:
        """The script saves. `is_next_epoch`: as of the next epoch's beginning, so no rest of this one is repeated."""
        self.is_saved = True
        self._ends_epoch = self._ends_epoch and not is_next_epoch
        self._changes.commit(looks_at_all=True)

    def is_changed(self) -> bool:
        """Since the last commit or save."""
        return bool(self._changes.find_changed())

    @property
    def random_state_to_save(self) -> RandomState | None:
        """The random state that a save by the script has to have, None for the present one."""
        return None if self.has_begun else self._random_state

    def on_step_begin(self, is_certain: bool) -> Reason:
        """The next step begins; `is_certain`: it asks for its batch. Returns what is wrong, "" for nothing.

        Raises CheckpointRefused in the first steps of a script that changes a scheduler or a module after each: no
        checkpoint would hold the last change.
        """
        self.has_begun = True
        changed = self._changes.find_changed(has_sent=self._donor.is_in_step())
        self.changed = [name for name in changed if is_certain or name in self._changes.untrained]
        if is_certain and self._donor.commit_late_changes(
            bool(changed) or self._changes.has_counted_changes(), self._ends_epoch
        ):
            self.changed.append("the random state")
        self._must_save_again = False
        if not self.changed or self._ends_epoch or self._changes.is_of_framework:
            self._in_a_row = 0
            self._was_save_changed = self._was_save_changed and not self.is_saved
            return ""
        self._in_a_row += 1
        if self.is_saved:
            self._must_save_again = self._in_a_row == 1 and not self._was_save_changed
            self._was_save_changed = True
        what = (
            f"{' and '.join(self.changed)} changed after session.step() of step {self._step} and before the next step: "
            "what that call saves lacks the change, and so does a run that resumes from it. Move session.step() below "
            "everything that belongs to the step"
        )
        is_always = self._first_step <= 1 and self._count == self._in_a_row == STEPS_BEFORE_REFUSAL
        if is_always and is_certain and not self._changes.certain.isdisjoint(self.changed):
            self._donor.close()
            raise CheckpointRefused(what)
        return what

    @property
    def may_be_refused(self) -> bool:
        """All steps so far have had a late change. Were this step saved, the run after the refusal would resume from it
        and refuse nothing.
        """
        looked = self._count + self._first_step > 0
        return self._first_step <= 1 and looked and self._count == self._in_a_row < STEPS_BEFORE_REFUSAL

    def why_save_again(self) -> Reason:
        """The reason to save again, for a script that changes something late now and then, "" if there is none."""
        return f"step {self._step} was saved before a change" if self._must_save_again else ""


class LateChanges:
    """Changes of the attached objects."""

    def __init__(self, attached: Mapping[str, Any]) -> None:
        self._looks: dict[str, ReadState] = {}
        self._sample: list[torch.Tensor] = []
        """Parameters in the host's memory, whose values show a change. An evaluation may have put other ones there for
        a while, and that moves their counters.
        """
        self._counters: list[int] = []
        self._own: set[str] = set()
        self.is_of_framework = _is_of_framework(attached)
        """The loop is a framework's: a change after a step is no mistake of the script."""
        if not self.is_of_framework:
            for name, obj in attached.items():
                if read_state := self._state_reader(name, obj):
                    self._looks[name] = read_state
        self.certain = {name for name, obj in attached.items() if isinstance(obj, Module) or _is_scheduler(obj)}
        """Names of those that no script changes at the beginning of a step, after it has asked for the batch."""
        self.untrained = self.certain - _trained_modules(attached)
        """Those that no script changes before its optimizer's step."""
        self._tensors = AllTensors({} if self.is_of_framework else attached)
        self._kept: dict[str, Any] = {}
        self._count = 0

    def _state_reader(self, name: str, obj: Any) -> ReadState | None:
        if samplers_of(obj):  # set_epoch() changes it
            return None
        if isinstance(obj, Module):
            return self._module_reader(obj)
        if isinstance(obj, Optimizer):
            return lambda: [list(group.values()) for group in obj.param_groups]
        if _is_scheduler(obj):
            nested = [obj, *getattr(obj, "_schedulers", ())]
            return lambda: [getattr(scheduler, "last_epoch", None) for scheduler in nested]
        if isinstance(obj, GradScaler):
            return lambda: id(getattr(obj, "_per_optimizer_states", None))
        if _state_dict_copies_tensors(obj):
            return None
        self._own.add(name)
        return lambda: _pickled_state(obj)

    def commit(self, looks_at_all: bool = False) -> None:
        """The state is that of a step."""
        if self._count == LOOKS_AT_SLOW_OBJECTS:
            self._drop_slow_readers()
        self._kept = {name: read_state() for name, read_state in self._looks.items()}
        self._counters = [tensor._version for tensor in self._sample]
        self._tensors.commit(looks_at_all)
        self._count += 1

    def find_changed(self, has_sent: bool | None = None) -> list[str]:
        """The names of what has changed since; `has_sent`: see `AllTensors`."""
        changed = [name for name, before in self._kept.items() if not _is_equal(self._looks[name](), before)]
        return [*changed, *(name for name in self._tensors.find_changed(has_sent) if name not in changed)]

    def has_counted_changes(self) -> bool:
        """Changes of parameters since, also of those that have their values back."""
        return [tensor._version for tensor in self._sample] != self._counters

    def _module_reader(self, module: torch.nn.Module) -> ReadState | None:
        """The first and the last parameter: of those elsewhere than in the host's memory their counters of changes."""
        sample = _first_and_last_parameter(module)
        if sample and all(_is_plain(tensor) and tensor.device.type == "cpu" for tensor in sample):
            self._sample += sample
            looks = list(map(_pieces_reader, sample))
            return lambda: [read_state() for read_state in looks]
        counted = list(map(local_part, sample))
        return (lambda: [tensor._version for tensor in counted]) if counted else None

    def _drop_slow_readers(self) -> None:
        for name in self._own & self._looks.keys():
            start = time.perf_counter()
            self._looks[name]()
            if time.perf_counter() - start > MAX_LOOK_S:
                del self._looks[name]


class AllTensors:
    """A piece of each tensor of the attached modules and optimizers."""

    def __init__(self, attached: Mapping[str, Any]) -> None:
        self._modules = {name: obj for name, obj in attached.items() if isinstance(obj, Module)}
        self._optimizers = {name: obj for name, obj in attached.items() if isinstance(obj, Optimizer)}
        self._sending = {name: obj for name, obj in self._modules.items() if _does_forward_send(obj)}
        """Modules whose forward passes send something to the other ranks if they may change a buffer."""
        self._parameters: dict[str, list[torch.Tensor]] = {}
        """Those of a module at a commit: one that shards them may have other ones later."""
        self._kept: dict[str, list[Any]] = {}
        """Pieces as they were at a commit; none if they were not looked at."""

    def commit(self, looks: bool) -> None:
        modules = self._modules.items() if looks else ()
        self._parameters = {name: list(map(local_part, module.parameters())) for name, module in modules}
        self._kept = self._look(self._modules) if looks else {}

    def find_changed(self, has_sent: bool | None) -> list[str]:
        """The names of what has changed since the commit; buffers have a name of their own.

        `has_sent`: this rank has sent something since, so that there may have been a forward pass, which changes
        buffers; None: there has been none.
        """
        modules = self._modules if has_sent is None else {} if has_sent else self._sending
        now = self._look(modules) if self._kept else {}
        return [name for name, pieces in now.items() if pieces != self._kept.get(name)]

    def _look(self, modules: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Pieces of parameters, of optimizers' states, and of the buffers of these modules, by name."""
        tensors = dict(self._parameters)
        for name, optimizer in self._optimizers.items():
            kept = list(getattr(optimizer, "state", {}).values())  # a wrapper need not have one
            tensors[name] = list(map(local_part, training_state.tensors(kept)))
        for (name, _), (holder, key) in step_files.buffer_places(modules):
            tensors.setdefault(f"a buffer of {name}", []).append(holder[key])
        return {name: list(map(_piece, parts)) for name, parts in tensors.items()}


class RestoredModules:
    """A sample of the values that `restore()` has loaded into modules, on any device."""

    def __init__(self, attached: Mapping[str, Any]) -> None:
        self._kept: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, obj in attached.items():
            if isinstance(obj, Module) and not _is_of_framework(attached):
                sample = list(map(local_part, _first_and_last_parameter(obj)))
                self._kept[name] = [(each, _middle_rows(each).clone()) for each in sample if _is_plain(each)]

    def find_replaced(self) -> list[str]:
        """Names of the modules that have other values now; another type of numbers or order in memory is no change."""
        return sorted(name for name, kept in self._kept.items() if any(_is_replaced(*each) for each in kept))


def _is_replaced(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    now = _middle_rows(tensor)
    if now.shape != before.shape or not tensor.untyped_storage().nbytes():  # a wrapper has it elsewhere
        return False
    return not torch.equal(before.to(now), now)


def _middle_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Some rows of a tensor, about _SAMPLED_PIECE_BYTES of it."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    count = min(len(rows), 1 + _SAMPLED_PIECE_BYTES * len(rows) // max(tensor.nbytes, 1))
    return rows.narrow(0, (len(rows) - count) // 2, count)


def _first_and_last_parameter(module: Module) -> list[torch.Tensor]:
    every = [parameter for parameter in module.parameters() if not parameter.is_inference()]
    return [*every[:1], *every[1:][-1:]]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _does_forward_send(module: Module) -> bool:
    wrapper = training_state.find_ddp(module)
    return wrapper is not None and bool(wrapper.broadcast_buffers)


def _piece(tensor: torch.Tensor) -> Any:
    """A piece of a tensor's memory; of one elsewhere than in the host's memory its counter of changes."""
    if tensor.is_inference():
        return None
    if (
        type(tensor) not in (Parameter, torch.Tensor)
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        return tensor._version
    size = _bytes_in_storage(tensor)
    length = min(size, PIECE_BYTES)
    return ctypes.string_at(tensor.data_ptr() + (size - length) // 2, length)


def _bytes_in_storage(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's address on that are its own: none of one that a module has given back meanwhile."""
    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return max(int(min(size, tensor.nbytes)), 0)


def _is_equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # of an array or a tensor that is another one, in the settings of an optimizer
        return False


def _is_of_framework(attached: Mapping[str, Any]) -> bool:
    return any(type(obj).__module__.startswith(_INTEGRATIONS_PREFIX) for obj in attached.values())


def _trained_modules(attached: Mapping[str, Any]) -> set[str]:
    """Names of the modules that an optimizer trains."""
    optimizers = [obj for obj in attached.values() if isinstance(obj, Optimizer)]
    trained = {id(parameter) for obj in optimizers for group in obj.param_groups for parameter in group["params"]}
    modules = {name: obj for name, obj in attached.items() if isinstance(obj, Module)}
    return {name for name, obj in modules.items() if any(id(parameter) in trained for parameter in obj.parameters())}


def _is_scheduler(obj: Any) -> bool:
    return isinstance(obj, LRScheduler)


def _pieces_reader(parameter: torch.Tensor) -> ReadState:
    """Pieces of a parameter's memory, which may be another one each time."""
    known, pieces = 0, set[tuple[int, int]]()

    def look() -> list[bytes]:
        nonlocal known, pieces
        if (start := parameter.data_ptr()) != known:
            size = _bytes_in_storage(parameter)
            length = min(size, _SAMPLED_PIECE_BYTES)
            known, pieces = start, {(start + skipped, length) for skipped in (0, (size - length) // 2, size - length)}
        return [ctypes.string_at(*piece) for piece in pieces]

    return look


class _Pickler(pickle.Pickler):
    """A pickler that writes a tensor's place and its counter of changes."""

    def persistent_id(self, obj: Any) -> Any:
        return (obj.data_ptr(), obj._version) if hasattr(obj, "_version") and hasattr(obj, "data_ptr") else None


def _state_dict_copies_tensors(obj: Any) -> bool:
    """Into each state that it gives, so that their places say nothing. False for a state that cannot be had."""
    try:
        first, second = obj.state_dict(), obj.state_dict()
    except Exception:  # noqa: BLE001 - of any object
        return False
    places = [[local_part(tensor).data_ptr() for tensor in training_state.tensors(state)] for state in (first, second)]
    return places[0] != places[1]


def _pickled_state(obj: Any) -> bytes:
    """The pickled state of an object; nothing of a state that cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(obj.state_dict())
    except Exception:  # noqa: BLE001 - of any object
        return b""
    return file.getvalue()

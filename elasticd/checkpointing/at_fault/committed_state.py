"""The small state that a rank keeps of its last commit, and the whole state as of that commit, put together at a fault.

Parameters and the optimizer's tensors stay where they are: they change in an optimizer's step only. What changes at
other times is kept at every commit: `step_record` has random states and buffers, `step_ring` learning rates, the
state of small objects (scheduler, scaler, sampler) and what lies on a device. `fingerprint` shows whether the rest has
been changed since.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from elasticd.checkpointing.at_fault import step_files, step_record
from elasticd.checkpointing.at_fault.donor_rules import (
    MUTABLE_SETTING_REASON,
    divided_state_reason,
    has_mutable_setting,
    is_alike_on_ranks,
    may_differ_reason,
    reason_against,
    trained_parameters,
)
from elasticd.checkpointing.at_fault.fingerprint import Fingerprint
from elasticd.checkpointing.at_fault.step_record import RecordedStep
from elasticd.checkpointing.at_fault.step_ring import Commit, StepRing, make_ring
from elasticd.checkpointing.context import SaveContext, cursor_of
from elasticd.checkpointing.state import device_copy, training_state
from elasticd.checkpointing.state.training_state import RandomState, StateDict
from elasticd.errors import CheckpointError, Reason

RNG_EXPECTED_KEY = "rng_expected"
"""Key in a state: True if random states are, at a commit, what they were in the backward pass."""
RNG_DRAWS_KEY = "rng_drawn"
"""Key in a state: of the ranks on the donor's node how they have drawn, for a rank that has died on another one."""
DONOR_KEY = "donor"
"""Key in a sharded state: the rank that saved state.pt at a fault."""
_SmallState = tuple[list[bytes], list[list[StateDict]]]
"""Small objects, pickled, and the groups of optimizers."""
CHANGED_REASON = "what is attached was changed after session.step()"
_REPEATED_CHANGE_REASON = "what is attached is changed between session.step() and the optimizer's step"
MAX_CHANGES_IN_A_ROW = 3
"""Steps in a row before which it may change where counters show it, such as by load_state_dict()."""


class CommittedState:
    """The state of the attached objects as of the last commit. The training thread calls `compare_with_commit` and
    `before_optimizer_step` before an optimizer's step and `commit` after it; the rest is for a fault, under a lock that
    keeps these out. `record_expected` is called in each backward pass, before this rank sends its first gradient.
    `averaged` is the result of `donor_rules.averaged_parameters`.
    """

    def __init__(
        self,
        context: SaveContext,
        attached: Mapping[str, Any],
        averaged: Mapping[int, torch.nn.Parameter],
        expect: Callable[[torch.Tensor], None],
    ) -> None:
        self._context, self._attached, self._averaged, self._expect = context, dict(attached), averaged, expect
        self._whole: Any = None
        """The whole fingerprint as of the last commit, where the optimizer's next step compares it."""
        self._changes = 0
        self._must_look = False
        """The next commit looks whether there are other tensors to watch."""
        self._stepped: set[int] = set()
        """The parameters, by id, that have a gradient in the step that such a commit ends."""
        self.commits = 0
        self._record: step_record.StepRecord
        self._ring: StepRing
        self._watched: Any = None
        """Addresses and sizes of the tensors in the ring."""
        self._recorded: Any = None
        """The places and parameters of which the record is made."""
        self._hooks: list[Any] = []
        self._more_hooks: dict[int, Any] = {}
        """Hooks by the id of a parameter that was trained in a backward pass without a hook."""
        objects = list(self._attached.values())
        self.optimizers = [obj for obj in objects if isinstance(obj, Optimizer)]
        self._others = [obj for obj in objects if not isinstance(obj, (Module, Optimizer))]
        self._states = list(map(nonblocking_state_reader, self._others))
        self._scalers = [obj for obj in self._others if isinstance(obj, GradScaler)]
        self._updates = self._scaler_update_marks()
        self._unlike = [index for index, obj in enumerate(self._others) if not is_alike_on_ranks(obj)]
        """Those that may differ between ranks: saves are refused then."""
        self._fingerprint = Fingerprint([obj for obj in objects if isinstance(obj, Module)], self.optimizers)
        self._watch()
        device = step_files.device_if_gpu(context.group.device)
        # Made here and not at the fault: it would break a CUDA graph that the script captures meanwhile.
        self.copies = None if device is None else device_copy.GpuCopies(device)
        """Copies from the rank's GPU, for the thread that saves."""

    def remove_hooks(self) -> None:
        for hook in (*self._hooks, *self._more_hooks.values()):
            hook.remove()
        self._more_hooks.clear()

    def close_record(self) -> None:
        """Close the record's file now, instead of when the cycles of this object are collected: a process that stays
        has a record in each round.
        """
        del self._record

    def reason_against(self) -> Reason:
        return reason_against(self._context, self._attached, self._averaged)

    # --- at a step ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch what the script may replace: buffers, parameters that are trained, groups of optimizers."""
        self._groups = _group_parameter_ids(self.optimizers)
        self._sizes = list(map(len, self._groups))
        places = dict(step_files.buffer_places(self._attached))
        self._buffers = {path: holder[key] for path, (holder, key) in places.items()}
        self._on_host = [path for path, buffer in self._buffers.items() if step_files.is_on_host(buffer)]
        self._on_device = [path for path, buffer in self._buffers.items() if not step_files.is_on_host(buffer)]
        recorded = _recorded_parameters(self.optimizers)
        on_device = [tensor for tensor in recorded if not step_files.is_on_host(tensor)]
        self._pieces = [step_record.piece(tensor, step_record.PIECE_BYTES) for tensor in on_device]
        # As bytes: tensors of one type are copied by one kernel.
        watched_memory = [step_record.piece(self._buffers[path]) for path in self._on_device] + self._pieces
        watched = [(memory.data_ptr(), len(memory)) for memory in watched_memory]
        if watched != self._watched:  # else a GPU may still be at a commit of the ring
            self._ring, self._watched = make_ring(self._context.group.device, watched_memory), watched
        on_host = list(filter(step_files.is_on_host, recorded))
        self._ensure_record({path: places[path] for path in self._on_host}, on_host)
        # Of FSDP2 no hook runs before gradients are sent: the random state of a rank that dies after that is lost.
        parallel = [model for obj in self._attached.values() if (model := training_state.find_ddp(obj)) is not None]
        parameters: list[Any] = [
            parameter for model in parallel for parameter in itertools.islice(trained_parameters(model), 1)
        ]
        for hook in self._hooks:
            hook.remove()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._expect) for parameter in parameters]

    def _ensure_record(self, places: Mapping[Any, step_record.BufferPlace], parameters: list[torch.Tensor]) -> None:
        """Keep the record that there is, if it is of these: another one takes 0.3 ms."""
        pieces = [(memory.data_ptr(), memory.numel()) for memory in parameters]
        recorded = (list(places), [id(holder) for holder, _ in places.values()], pieces)
        if recorded == self._recorded:
            with contextlib.suppress(step_record.OtherBuffers):
                self._record.locate_tensors()
                return
        path = step_files.record_path("commit", self._context.group.rank)
        device = step_files.device_if_gpu(self._context.group.device)
        followed = [place for (_, key), place in places.items() if isinstance(key, str)]
        fixed = list(places.values())[len(followed) :]
        self._record = step_record.StepRecord(path, followed, parameters, device, fixed)
        self._recorded = recorded

    def _watch_again(self) -> Reason:
        """Parameter groups, buffers or parameters that are trained may be other ones than at the commit before.

        Returns why this rank can no longer be a donor, or "".
        """
        if why := self.reason_against() or divided_state_reason(self.optimizers, self._stepped):
            return why
        before = self._groups
        self._watch()
        if self._groups != before:
            self._fingerprint.recollect_at_next_commit()
        return ""

    def rewatch_at_next_commit(self) -> None:
        """At the next commit: a save has been made, which takes longer than that."""
        self._must_look = True

    def hook_first_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's first parameter with a gradient: those that had a hook are frozen now, as where two
        models train in turn.
        """
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        first = next(
            (parameter for parameter in parameters if parameter.requires_grad and parameter.grad is not None), None
        )
        if first is not None and id(first) not in self._more_hooks:
            self._more_hooks[id(first)] = first.register_post_accumulate_grad_hook(self._expect)

    def before_optimizer_step(self, is_previous_committed: bool) -> None:
        """Before an optimizer's step; `is_previous_committed`: the step before it has been."""
        if self._looks_at(self.commits + 1) and self._context.group.world_size > 1:
            groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
            self._stepped = {id(weight) for parameters in groups for weight in parameters if weight.grad is not None}
        # A GPU may not have passed the commit when the next one is made, with which counters are compared from then on.
        if self.copies is not None and is_previous_committed and self._fingerprint.has_irregular_change():
            self._ring.last.is_spoilt = True
        self._ring.before_optimizer_step()

    def compare_with_commit(self) -> Reason:
        """Before the optimizer's next step, with the last commit. Returns why this rank gives up, "" if it does not.

        Where counters or addresses show a change, a fault before this step has found it, too; a script may make such a
        change now and then, and one without at no time.
        """
        before, self._whole = self._whole, None
        if before is None:
            return ""
        now = self._fingerprint.read_all()
        self._changes = self._changes + 1 if now != before else 0
        self._must_look = self._must_look or self._changes > 0
        is_unseen = now != before and now[:2] == before[:2]
        return _REPEATED_CHANGE_REASON if self._changes == MAX_CHANGES_IN_A_ROW or is_unseen else ""

    def has_updated_scaler(self) -> bool:
        """Since the last commit: if no optimizer has made a step, a GradScaler has skipped it."""
        return bool(self._scalers) and any(map(operator.is_not, self._updates, self._scaler_update_marks()))

    def _scaler_update_marks(self) -> list[Any]:
        """Each update makes a new one. In a torch without them a step that is skipped is no commit."""
        return [getattr(scaler, "_per_optimizer_states", None) for scaler in self._scalers]

    def skip_commit(self) -> None:
        """Instead of a commit, where no optimizer has made a step: other attached things may have been changed."""
        self._whole = None

    def record_expected(self, step: int) -> None:
        """Record, in the backward pass, what this rank will be at the end of `step`, as far as that is known."""
        with contextlib.suppress(step_record.OtherBuffers):  # from the commit on there are other ones to watch
            self._record.record_expected(step)

    def commit(self, step: int, scaler_skipped: bool) -> Reason:
        """The memory is at the end of this step, or a GPU will be. Returns as `compare_with_commit` does.

        `scaler_skipped`: no optimizer has made a step, so counters have not grown as usual. Raises what a state_dict()
        may.
        """
        self.commits += 1
        if self._scalers:
            self._updates = self._scaler_update_marks()
        if scaler_skipped:
            self._stepped.clear()
            self._fingerprint.recollect_at_next_commit()
        objects = self._copy_small_state()
        digest = self._unlike_objects_digest(objects) if self._unlike else b""
        looks = self._looks_at(self.commits)
        sizes = [len(group["params"]) for groups in objects[1] for group in groups]
        if (looks or sizes != self._sizes) and (why := self._watch_again()):
            return why
        try:
            self._record.commit(step, digest)
        except step_record.OtherBuffers:
            if why := self._watch_again():
                return why
            self._record.commit(step, digest)
        self._ring.commit(step, objects)
        self._fingerprint.commit()
        if looks:
            self._must_look = False
            self._fingerprint.recollect_if_replaced()
            self._whole = self._fingerprint.read_all()
        self._ring.last.revision = self._fingerprint.revision
        return ""

    def _looks_at(self, commit: int) -> bool:
        return self._must_look or commit & (commit - 1) == 0

    def has_drawn(self) -> bool:
        """Random numbers since the last commit."""
        return self._record.has_drawn()

    def are_tensors_changed(self) -> bool:
        """Tensors have been, since then, as far as that is known at once."""
        return self.copies is None and self._fingerprint.is_changed()

    def mark_next_step_begun(self) -> None:
        """The next step does."""
        self._record.mark_next_step_begun()

    def replace_commit(self, step: int) -> None:
        """Replace the last commit: the script has changed something before the next step begins."""
        objects = self._copy_small_state()
        with contextlib.suppress(step_record.OtherBuffers):  # found at the next commit
            self._record.replace_commit(step, self._unlike_objects_digest(objects) if self._unlike else b"")
        self._ring.last.small_state = objects
        self._whole = None
        if self.are_tensors_changed():
            self._fingerprint.recollect_at_next_commit()
            self._fingerprint.commit()
            self._ring.last.revision = self._fingerprint.revision

    def set_step_s(self, step_s: float) -> None:
        """Say how long a step takes, at least."""
        self._fingerprint.set_step_s(step_s)

    def _copy_small_state(self) -> _SmallState:
        small = [pickle.dumps(state_of(), pickle.HIGHEST_PROTOCOL) for state_of in self._states]
        return small, [[group.copy() for group in optimizer.param_groups] for optimizer in self.optimizers]

    def _unlike_objects_digest(self, small_state: _SmallState) -> bytes:
        return hashlib.blake2b(b"".join([small_state[0][index] for index in self._unlike]), digest_size=16).digest()

    # --- at a fault ---------------------------------------------------------------------------------------------------

    def is_gpu_behind(self) -> bool:
        """The GPU has not passed the last commit."""
        return self._ring.is_device_behind()

    def commit_in_memory(self) -> Commit | None:
        """The commit that the memory is at, if there is one."""
        return self._ring.commit_in_memory()

    def has_changed(self, commit: Commit) -> bool:
        """The state is not that of this commit any more."""
        path = step_files.record_path("commit", self._context.group.rank)
        committed = step_record.read(path, commit.step, self._host_buffers())
        return (
            not commit.is_intact()
            or _group_parameter_ids(self.optimizers) != self._groups
            or self._fingerprint.is_changed()
            or committed is None
            or committed.pieces != self._record.current_pieces()
            or commit.revision != self._fingerprint.revision
            or self._gpu_bytes(self._pieces) != self._gpu_bytes(commit.buffers[len(self._on_device) :])
        )

    def check_unchanged(self, commit: Commit) -> None:
        """Raises CheckpointError if it has changed, or cannot be saved any more."""
        if self.has_changed(commit):
            raise CheckpointError(CHANGED_REASON)
        now = {path: holder[key] for path, (holder, key) in step_files.buffer_places(self._attached)}
        kinds = [
            {path: step_record.buffer_kind(buffer) for path, buffer in buffers.items()}
            for buffers in (now, self._buffers)
        ]
        on_gpu = step_files.device_if_gpu(self._context.group.device) is not None
        copied = [(now[path].data_ptr(), now[path].nbytes) for path in self._on_device if path in now]
        if (
            kinds[0] != kinds[1]
            or (on_gpu and any(now[path] is not buffer for path, buffer in self._buffers.items()))
            or copied != self._watched[: len(self._on_device)]
        ):
            raise CheckpointError("a module has other buffers than at the step")
        if why := self.reason_against():
            raise CheckpointError(why)

    def _host_buffers(self) -> list[torch.Tensor]:
        return [self._buffers[path] for path in self._on_host]

    def _gpu_bytes(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """The bytes of these tensors, as they are on the GPU now."""
        starts = [int(tensor.storage_offset()) for tensor in tensors]
        parts = [
            (0, tensor.untyped_storage(), at, at + len(tensor)) for tensor, at in zip(tensors, starts, strict=True)
        ]
        return [] if self.copies is None else [bytes(data) for _, data in self.copies.copy_pieces(parts)]

    def _small_objects(self, commit: Commit) -> Iterator[tuple[str, Any]]:
        """The small objects as of the commit."""
        names = [name for name, obj in self._attached.items() if any(obj is other for other in self._others)]
        for name, data in zip(names, commit.small_state[0], strict=True):
            yield name, pickle.loads(data)

    def content(self, commit: Commit) -> StateDict:
        """The whole state as `Saver` saves it. Raises CheckpointError, and what a state_dict() may raise."""
        step = commit.step
        drawn, random_states, is_as_expected, buffers = self._read_records(step)
        for path, copied in zip(self._on_device, commit.buffers, strict=False):
            buffer = self._buffers[path]
            buffers[path] = copied.view(buffer.dtype).view(buffer.shape) if len(copied) else buffer
        small = dict(self._small_objects(commit))
        for name, key in buffers.keys() & {(name, key) for name in small for key in step_files.SCALER_ATTRIBUTES}:
            (data,) = self._gpu_bytes([step_record.piece(buffers[name, key])])
            small[name][key] = torch.frombuffer(bytearray(data), dtype=buffers.pop((name, key)).dtype).item()
        now = training_state.collect_states({name: obj for name, obj in self._attached.items() if name not in small})
        content = {name: small[name] if name in small else now[name] for name in self._attached}
        for (name, key), value in buffers.items():
            if isinstance(key, str):
                content[name][key] = value
            else:
                number, what = key
                content[name]["state"][number] = {**content[name]["state"][number], what: value}
        optimizers = [name for name, obj in self._attached.items() if isinstance(obj, Optimizer)]
        for name, groups in zip(optimizers, commit.small_state[1], strict=True):
            if has_mutable_setting(groups):
                raise CheckpointError(MUTABLE_SETTING_REASON)
            for saved, committed in zip(content[name]["param_groups"], groups, strict=True):
                saved.update({key: value for key, value in committed.items() if key != "params"})
        return {**content, **self._reserved_part(step, drawn, random_states, is_as_expected)}

    def cursor(self, commit: Commit) -> Any:
        """The position of the attached sampler."""
        return cursor_of(self._attached, dict(self._small_objects(commit)))

    def _reserved_part(
        self, step: int, drawn: Sequence[RankDraws], random_states: list[Any], is_as_expected: bool
    ) -> StateDict:
        own = self._context.reserved_part(step)
        described = [(rank.rank, rank.previous_step, rank.digests) for rank in drawn]
        return {
            training_state.RESERVED_NAME: {
                **own,
                "rng": random_states,
                RNG_EXPECTED_KEY: is_as_expected,
                RNG_DRAWS_KEY: described,
            }
        }

    def _read_records(self, step: int) -> tuple[list[RankDraws], list[Any], bool, dict[tuple[str, Any], torch.Tensor]]:
        """The draws of those ranks of this node that have finished `step`, all random states that it has as of then
        (None for the others), whether this rank's is as it has expected, and rank 0's buffers, else ours. Raises
        CheckpointError.
        """
        group, own = self._context.group, self._host_buffers()
        ranks = [RankRecord(rank, step, own) for rank in range(group.world_size)]
        first, mine = ranks[0], ranks[group.rank]
        if mine.committed is None:
            raise CheckpointError(f"step {step} has no record")
        if (
            self._unlike
            and group.rank != 0
            and (not first.committed or first.committed.digest != mine.committed.digest)
        ):
            names = [name for name, obj in self._attached.items() if any(obj is self._others[i] for i in self._unlike)]
            raise CheckpointError(may_differ_reason(" or ".join(names)))
        if any(record.committed and record.committed.pieces != mine.committed.pieces for record in ranks):
            raise CheckpointError(
                "the parameters are not the same on every rank, as DistributedDataParallel keeps them: does each rank "
                "change them by itself, by noise of its own or a step that it leaves out?"
            )
        # A record from before such a change, and one from after it, are no state of all ranks.
        both = [(record.committed, mine.committed) for record in ranks if record.committed is not None]
        if any(
            (b.has_late_changes and not a.is_next_begun) or (a.has_late_changes and not b.is_next_begun)
            for a, b in both
        ):
            raise CheckpointError(
                f"a rank had not begun the step after {step}, before which the script changes something"
            )
        drawn = [record.draws for record in ranks if record.committed is not None]
        random_states = [record.random_state(drawn) for record in ranks]
        buffers = (first.committed or mine.committed).buffers
        if first.committed is None and first.expected and mine.expected and self._record.moved_at != step:
            buffers = step_record.expected_or_committed(first.expected.buffers, mine.expected.buffers, buffers)
        return drawn, random_states, mine.is_as_expected, dict(zip(self._on_host, buffers, strict=True))


_GeneratorDigests = Mapping[str, str] | None
"""Digests of the state of each random generator; None if that is not known."""


@dataclass(frozen=True, slots=True)
class RankDraws:
    """The draws of a rank that has finished a step, in it and before: ranks with equal digests draw alike."""

    rank: int
    previous_step: int  #: the last step that it had finished before, 0 for none
    digests: Sequence[_GeneratorDigests]  #: at the commit, as it was expected, and both of the last step before
    random_state: Mapping[str, Any]

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> list[RankDraws]:
        """Those in a saved state, which has the random states already."""
        return [cls(rank, last, digests, saved["rng"][rank]) for rank, last, digests in saved.get(RNG_DRAWS_KEY, ())]


class RankRecord:
    """A rank's record of a step, and of the last one that it has finished before."""

    def __init__(self, rank: int, step: int, buffers: Sequence[torch.Tensor], round: int | None = None) -> None:
        self._rank, self._step, self._buffers = rank, step, buffers
        self._path = step_files.record_path("commit", rank, round)
        self.committed, self.expected = self._read(step)

    def random_state(self, others: Sequence[RankDraws]) -> RandomState | None:
        """The rank's random state as of the step; None if nothing is known of the rank. Raises CheckpointError if it
        may have drawn more.
        """
        random_state = self.committed.random_state if self.committed else self._likely_state(others)
        if random_state is None and self.expected is not None:
            raise CheckpointError(
                f"rank {self._rank} had not finished step {self._step}, and draws random numbers between its backward "
                "pass and session.step()"
            )
        return random_state

    @property
    def draws(self) -> RankDraws:
        assert self.committed is not None
        last, *before = self.previous_records
        digests = tuple(map(_generator_digests, (self.committed, self.expected, *before)))
        return RankDraws(self._rank, last, digests, self.committed.random_state)

    def _read(self, step: int) -> tuple[RecordedStep | None, RecordedStep | None]:
        committed, expected = (step_record.read(self._path, step, self._buffers, kind) for kind in (False, True))
        return committed, expected

    @property
    def is_as_expected(self) -> bool:
        """It has drawn nothing between the backward pass and the commit."""
        return (
            self.committed is not None
            and self.expected is not None
            and self.expected.has_same_random_state(self.committed)
        )

    @functools.cached_property
    def previous_records(self) -> tuple[int, RecordedStep | None, RecordedStep | None]:
        """The last step that it has finished before, 0 for none; as `committed` and `expected`."""
        last = max((earlier for earlier in step_record.committed_steps(self._path) if earlier < self._step), default=0)
        return last, *(self._read(last) if last else (None, None))

    def _likely_state(self, others: Sequence[RankDraws]) -> RandomState | None:
        """The random state that this rank, which is dead, would have had at the commit; None if that is not known."""
        of = self.expected or self.previous_records[1]
        likely = (
            {kind: self._likely_generator_state(kind, others) for kind in of.random_state} if of is not None else {}
        )
        return likely if likely and None not in likely.values() else None

    def _likely_generator_state(self, kind: str, others: Sequence[RankDraws]) -> Any:
        """The state of one generator: that of a rank where it was in the same state until then, or what was expected,
        if this rank draws none after the backward pass.
        """
        last, *records = self.previous_records
        committed_before, expected_before, expected = map(_generator_digests, (*records, self.expected))
        drew_none = _is_same_state(kind, committed_before, expected_before)
        as_expected = True
        for other in others:
            own_committed, own_expected, own_before, own_expected_before = other.digests
            has_been_equal = last == other.previous_step and _is_same_state(kind, committed_before, own_before)
            if has_been_equal and _is_same_state(kind, expected, own_expected) is not False:
                return other.random_state.get(kind)
            if drew_none is None or _is_same_state(kind, own_before, own_expected_before) is drew_none:
                as_expected = as_expected and bool(_is_same_state(kind, own_committed, own_expected))
        if drew_none is False or not as_expected:
            return None
        return self.expected and self.expected.random_state[kind]


def _generator_digests(found: RecordedStep | None) -> _GeneratorDigests:
    if found is None:
        return None
    every = found.random_state.items()
    return {kind: hashlib.blake2b(training_state.to_bytes(value), digest_size=16).hexdigest() for kind, value in every}


def _is_same_state(kind: str, one: _GeneratorDigests, other: _GeneratorDigests) -> bool | None:
    """True if the state of one generator is the same in both; None if a state is not known."""
    return None if one is None or other is None else one.get(kind) == other.get(kind)


def nonblocking_state_reader(obj: Any) -> Callable[[], Any]:
    """A function that returns an object's state without waiting for the GPU: that of a GradScaler lacks the part which
    lies there.
    """
    if not isinstance(obj, GradScaler):
        state_dict: Callable[[], Any] = obj.state_dict
        return state_dict

    def of_scaler() -> StateDict:
        if not any(step_files.is_on_gpu(vars(obj).get(where)) for where in step_files.SCALER_ATTRIBUTES.values()):
            return obj.state_dict()
        numbers = {"growth_factor": obj.get_growth_factor(), "backoff_factor": obj.get_backoff_factor()}
        return {**numbers, "growth_interval": obj.get_growth_interval()}

    return of_scaler


def _recorded_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of which a commit record has a piece."""
    parameters = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    trained = [training_state.local_part(parameter) for parameter in parameters]
    every = -(-len(trained) // step_record.MAX_PIECES)
    return trained[:: max(every, 1)]


def _group_parameter_ids(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    """The parameters of each group, by id."""
    return [list(map(id, group["params"])) for optimizer in optimizers for group in optimizer.param_groups]

"""Hugging Face Trainer in a session: `trainer.add_callback(ElasticdCallback(trainer))`.

Trainer's loop stays its own. The callback exchanges the sampler of its training data, restores its whole state when the
loop begins, and ends each of its optimizer steps with `session.step()`. Trainer's checkpoints stay the results that
they are; a restart continues from the session's, which fit any number of ranks and the middle of an epoch.

Three things of Trainer's cannot be left to it. It draws its batches by a sampler that knows neither the number of ranks
at the save nor the middle of an epoch, so the callback puts the session's sampler in its place, with the number of
accumulated batches that the present number of ranks needs. It counts tokens or batches to average the loss, so the
callback scales the loss of batches that are shorter, or stand in for none, to keep the sum over the global batch the
same for any number of ranks. And it keeps a history of its log in its own checkpoints, so the callback has a file of
lines beside the session's, cut at the step that was resumed from.

What Trainer was about to do after a step (an evaluation, a save) is part of the state: a restart between the step and
its evaluation makes up for it, and one after it does not evaluate twice. What the evaluation has changed (the best
metric, the patience of early stopping) follows from its line of the log where the state was saved before it.

Only methods that Trainer documents as overridable are wrapped, and each calls the original one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from elasticd.bounded_json import JsonObject
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.lineage import lineage
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.object_url import resolve
from elasticd.errors import UsageError
from elasticd.integrations import check_world_size, refuse_second_training, require
from elasticd.integrations.accelerate import forget_preparation, reload_ranks
from elasticd.integrations.loader import ElasticLoader, batch_sampler_of
from elasticd.session import Session, init

_WRAPPED_METHODS = ("get_train_dataloader", "compute_loss", "evaluation_loop", "train")
"""Methods of this trainer that the callback wraps; Trainer documents them as those that a subclass may override."""
_PLAIN_TYPES = {type(None), bool, int, float, str}
_IGNORED_LABEL = -100


class ElasticdCallback:
    """Gives a Trainer a session, `session`, and resumes it from the session's newest checkpoint by itself.

    Args:
        trainer: with a map-style training dataset. Its `per_device_train_batch_size` is what fits on a rank, and its
            `gradient_accumulation_steps` are set from that, the global batch and the number of ranks.
        global_batch: samples in one optimizer step, over all ranks; by default what Trainer's arguments make of the
            present number of ranks. Give it where that number may change.
        every, keep: as in `Session.checkpoint`.
        directory: of the session's checkpoints; by default ELASTICD_CHECKPOINT_DIR, else `elasticd` in `output_dir`.
        session: of the script, where `session.run` calls what makes the trainer; by default one of its own.

    Raises UsageError for a Trainer that shares out model or batches in a way that a session cannot keep.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        global_batch: int | None = None,
        every: Any = 50,
        keep: int = 3,
        directory: str | os.PathLike[str] | None = None,
        session: Session | None = None,
    ) -> None:
        _check_supported(trainer)
        self.session = session or init()
        self.session.at_entry(reload_ranks)
        args = trainer.args
        check_world_size(
            args.world_size, self.session.world_size, "Trainer", "on CPUs, give TrainingArguments(use_cpu=True)"
        )
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._trainer = trainer
        self._global_batch = global_batch or per_step * self.session.world_size
        self._every, self._keep = every, keep
        chosen = directory or os.environ.get("ELASTICD_CHECKPOINT_DIR") or Path(args.output_dir) / "elasticd"
        self._directory = resolve(chosen)
        self._history = _LogHistory(self._directory)
        self._phase = ExitStack()
        self._micro = 0
        self._due: dict[str, Any] = {"evaluate": False, "save": False}
        """The actions of Trainer after this step; "evaluated": the last step after which it has evaluated."""
        self._missed = dict(self._due)
        """The actions that a fault has kept it from after the step that was resumed from."""
        args.ignore_data_skip = True
        args.average_tokens_across_devices = True  # however many labels each rank has
        replaced = (*_WRAPPED_METHODS, "evaluate")
        self._replaced = {name: vars(trainer)[name] for name in replaced if name in vars(trainer)}
        self._has_trained = self._is_withdrawn = False
        self._original = {name: getattr(trainer, name) for name in _WRAPPED_METHODS}
        for name in _WRAPPED_METHODS:
            setattr(trainer, name, getattr(self, f"_{name}"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event that nothing is done for
            return lambda *_, **__: None
        raise AttributeError(name)

    def withdraw(self) -> None:
        """Leave the trainer as it was made: its next training is none of this session."""
        if self._is_withdrawn:
            return
        self._is_withdrawn = True
        self._trainer.remove_callback(self)
        for name in _WRAPPED_METHODS:
            self.give_back(name)

    def give_back(self, name: str) -> None:
        """Undo the wrapping of a method."""
        vars(self._trainer).pop(name, None)
        if name in self._replaced:
            setattr(self._trainer, name, self._replaced[name])

    # --- what the trainer calls in place of its own methods ----------------------------------------------------------

    def _train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Call Trainer's own `train`, without a checkpoint of its own where the session has one: rank 0 decides for
        all.
        """
        import torch.distributed as dist

        refuse_second_training(self._has_trained)
        self._has_trained = True
        has_own = [self.session.rank == 0 and bool(lineage(self._directory)[0])]
        if self.session.world_size > 1:
            dist.broadcast_object_list(has_own)
        return self._original["train"](None if has_own[0] else resume_from_checkpoint, *args, **options)

    def _get_train_dataloader(self) -> Any:
        args = self._trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        own = self._original["get_train_dataloader"]()
        self._loader = _TrainerLoader(own, self._global_batch, args.per_device_train_batch_size, seed)
        self._loader.trainer = self._trainer
        args.gradient_accumulation_steps = self._loader.sampler.accumulate
        return self._loader

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return Trainer's loss, scaled to what this micro-batch is worth in the global batch."""
        loss = self._original["compute_loss"](model, inputs, *args, **options)
        if not model.training:
            return loss
        sampler = self._loader.sampler
        if not sampler.samples(self._micro):
            return loss * 0
        if options.get("num_items_in_batch") is None:
            return loss * sampler.loss_scale(self._micro) * sampler.accumulate  # Trainer divides by that number
        return loss  # Trainer divides the sum by the number of labels in the global batch, which is exact

    def _evaluation_loop(self, *args: Any, **options: Any) -> Any:
        with self.session.phase("eval"):
            return self._original["evaluation_loop"](*args, **options)

    # --- Trainer's events --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach what Trainer has made by now, restore, and continue its counters from the session's state."""
        trainer, sampler = self._trainer, self._loader.sampler
        forget_preparation([trainer.model])
        scaler = {"scaler": trainer.accelerator.scaler} if trainer.accelerator.scaler is not None else {}
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.session.attach(
            model=trainer.model_wrapped,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            sampler=sampler,
            trainer=_TrainerState(trainer, self._due),
            **scaler,
        )
        resumed = self.session.restore(self._directory)
        self.session.checkpoint(self._every, self._directory, self._keep)
        if resumed is not None:
            self._find_missed_actions(args, state, control)
        elif state.global_step:  # from a checkpoint of Trainer's
            epoch, steps = divmod(state.global_step, sampler.steps_per_epoch)
            sampler.set_epoch(epoch)
            sampler.load_state_dict({**sampler.state_dict(), "offset": steps * sampler.global_batch})
        elif self.session.rank == 0:
            self._history.cut_to(0)
        self._due.setdefault("evaluated", -1)
        trainer._globalstep_last_logged = trainer._initial_global_step = state.global_step

    def _find_missed_actions(self, args: Any, state: Any, control: Any) -> None:
        """Read the log's history, and find what has to be made up for: rank 0 decides for all."""
        import torch.distributed as dist

        step = state.global_step
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        shared: list[Any] = [[], self._due, {}, False]
        if self.session.rank == 0:
            shared[0] = self._history.cut_to(step)
            ended = not len(self._loader.sampler)
            logged = {name: value for line in shared[0] if line["step"] == step for name, value in line.items()}
            evaluated = any(name.startswith("eval_") for name in logged)
            saved = (folder / "trainer_state.json").exists()
            if evaluated and self._due.get("evaluated", step) != step:
                shared[2:] = logged, saved
            shared[1] = {
                "evaluate": not evaluated and (self._due["evaluate"] or (ended and args.eval_strategy == "epoch")),
                "save": not saved and (self._due["save"] or (ended and args.save_strategy == "epoch")),
            }
        if self.session.world_size > 1:
            dist.broadcast_object_list(shared)
        state.log_history, self._missed, metrics, is_saved = shared
        if metrics:
            self._take_evaluation(args, state, control, metrics)
            if is_saved and state.best_global_step == step:
                state.best_model_checkpoint = str(folder)

    def _take_evaluation(self, args: Any, state: Any, control: Any, metrics: JsonObject) -> None:
        """Change what Trainer has changed after the evaluation with this result."""
        trainer = self._trainer
        for callback in _stateful_callbacks(trainer):
            callback.on_evaluate(args, state, control, metrics=metrics)
        trainer.evaluate = lambda **_: metrics
        trainer._evaluate(None, None)  # steps a schedule that depends on the metric
        self.give_back("evaluate")
        trainer._determine_best_metric(metrics, None)
        self.on_evaluate(args, state)

    def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._due["evaluated"] = state.global_step
        self.session.save_again("its evaluation")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._micro = 0
        self._phase.close()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._micro += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step in the session, after what Trainer does next is known."""
        sampler = self._loader.sampler
        state.epoch = sampler.epoch + min(sampler.offset / sampler.global_batch + 1, n := sampler.steps_per_epoch) / n
        self._request_missed_actions(control)
        self._due.update(evaluate=control.should_evaluate, save=control.should_save)
        self.session.step()
        self._apply_stop_and_phase(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._request_missed_actions(control)
        self._apply_stop_and_phase(control)

    def _request_missed_actions(self, control: Any) -> None:
        control.should_evaluate |= self._missed.pop("evaluate", False)
        control.should_save |= self._missed.pop("save", False)

    def _apply_stop_and_phase(self, control: Any) -> None:
        """A stop is at once; before Trainer saves, the phase is that."""
        if self.session.should_stop:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False
        if control.should_save:
            self._phase.enter_context(self.session.phase("checkpoint"))

    def on_save(self, *_: Any, **__: Any) -> None:
        self._phase.close()

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.session.rank == 0 and self._trainer.is_in_train:
            self._history.append(state.log_history[-1])

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The code from here on makes no steps."""
        self._phase.close()
        self._phase.enter_context(self.session.phase("eval"))
        self._history.wait_for_upload()


class _TrainerLoader(ElasticLoader):
    """The epochs for Trainer's loop, which counts them from its own start."""

    trainer: Any

    def __iter__(self) -> Iterator[Any]:
        sampler, trainer = self.sampler, self.trainer
        if trainer.state.global_step >= trainer.state.max_steps:
            return
        if not len(sampler):
            sampler.set_epoch(sampler.epoch + 1)
        counts_labels = trainer.compute_loss_func is None
        for number, batch in enumerate(super().__iter__()):
            if counts_labels and "labels" in batch and not sampler.samples(number % sampler.accumulate):
                batch["labels"].fill_(_IGNORED_LABEL)  # a stand-in's labels are not counted
            yield batch


class _TrainerState:
    """The part of a Trainer's state that is not in model, optimizer and schedule; its log has a file of its own."""

    rank_independent = True
    _FIELDS = (
        "global_step",
        "epoch",
        "total_flos",
        "num_input_tokens_seen",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
    )

    def __init__(self, trainer: Any, due: dict[str, Any]) -> None:
        self._trainer, self._due = trainer, due

    def state_dict(self) -> StateDict:
        """Return the fields and the callbacks' states, as plain values.

        Called at every step: JSON and back would take 20 to 40 µs of the 200 that a commit may take.
        """
        fields = {name: getattr(self._trainer.state, name) for name in self._FIELDS}
        callbacks = [callback.state()["attributes"] for callback in _stateful_callbacks(self._trainer)]
        return {"fields": _plain_copy(fields), "callbacks": _plain_copy(callbacks), "due": dict(self._due)}

    def load_state_dict(self, state: StateDict) -> None:
        for name, value in state["fields"].items():
            setattr(self._trainer.state, name, value)
        for callback, attributes in zip(_stateful_callbacks(self._trainer), state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)
        self._due.update(state["due"])


def _stateful_callbacks(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if callable(getattr(callback, "state", None))]


def _plain_copy(value: Any) -> Any:
    """A copy of plain values, as JSON has them."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if isinstance(value, dict):
        return {str(key): _plain_copy(item) for key, item in value.items()}
    return [_plain_copy(item) for item in value] if isinstance(value, (list, tuple)) else _plain_number(value)


def _plain_number(value: Any) -> float | str:
    """numpy's and torch's numbers as Python's."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


class _LogHistory:
    """The lines of Trainer's log, on rank 0: in a file beside the checkpoints, and in their object store.

    A full disk, or a store that does not answer, stops no training; the session's saves report it.
    """

    _NAME = "log_history.jsonl"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self._NAME
        self._store = store_of(directory)
        self._is_new = Event()
        """There are lines that the store does not have."""
        self._thread = Thread()

    def append(self, line: JsonObject) -> None:
        """Add a line of the log."""
        with suppress(OSError), self._path.open("a", encoding="ascii") as file:
            file.write(json.dumps(line, default=_plain_number) + "\n")
        self._start_upload()

    def cut_to(self, step: int) -> list[JsonObject]:
        """The lines up to a step. The others are removed, as is one that a kill has cut off."""
        lines: list[JsonObject] = []
        with suppress(OSError):
            lines = _parse_lines(self._path.read_bytes())
        if self._store is not None:
            with suppress(OSError):
                if stored := _parse_lines(self._store.read_small_file(self._NAME) or b""):
                    last = stored[-1]["step"]  # this node may have been another rank's meanwhile
                    lines = stored + [line for line in lines if line["step"] >= last and line not in stored]
        past = [line for line in lines if line["step"] <= step]
        with suppress(OSError):
            self._path.write_text("".join(json.dumps(line) + "\n" for line in past), encoding="ascii")
        self._start_upload()
        return past

    def _start_upload(self) -> None:
        """A thread appends the line: the loop does not wait for the store."""
        self._is_new.set()
        if self._store is not None and not self._thread.is_alive():
            self._thread = Thread(target=self._upload, name="elasticd-log", daemon=True)
            self._thread.start()

    def _upload(self) -> None:
        while self._store is not None and self._is_new.is_set():
            self._is_new.clear()
            with suppress(OSError):
                self._store.write_small_file(self._NAME, self._path.read_bytes())

    def wait_for_upload(self) -> None:
        """Until the store has all lines, or does not answer."""
        if self._thread.is_alive():
            self._thread.join()
        self._upload()


def _parse_lines(content: bytes) -> list[JsonObject]:
    lines = []
    for line in content.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _check_supported(trainer: Any) -> None:
    base = require("transformers", "transformers").Trainer
    if not isinstance(trainer, base):
        raise UsageError(f"ElasticdCallback(trainer): {type(trainer).__name__} is no transformers.Trainer")
    strategy = getattr(trainer.args, "train_sampling_strategy", "")
    shared = any(getattr(trainer, f"get_{kind}_size", int)() > 1 for kind in ("tp", "cp", "sp"))
    reasons = {
        "auto_find_batch_size changes the global batch": trainer.args.auto_find_batch_size,
        "DeepSpeed keeps a state of its own on every rank": trainer.is_deepspeed_enabled,
        "Trainer's FSDP keeps a part of the state on every rank": trainer.is_fsdp_enabled,
        "tensor, context and sequence parallelism share batches between ranks": shared,
        "batch_rebalance makes batches of its own": strategy == "batch_rebalance",
    }
    if why := next((why for why, applies in reasons.items() if applies), None):
        raise UsageError(f"ElasticdCallback: {why}; leave it out, or resume from Trainer's own checkpoints")
    if getattr(trainer.get_train_dataloader, "__func__", None) is not base.get_train_dataloader:
        size, usual = batch_sampler_of(trainer.get_train_dataloader()).batch_size, trainer.args.train_batch_size
        if size != usual:
            raise UsageError(
                f"ElasticdCallback: {type(trainer).__name__} takes batches of {size} samples, not of the {usual} of "
                "per_device_train_batch_size; resume from Trainer's own checkpoints"
            )

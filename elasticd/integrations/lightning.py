"""Lightning in a session.

    elastic = ElasticdCallback(global_batch=64)
    trainer = Trainer(max_epochs=3, **elastic.arguments(callbacks=[...]))
    trainer.fit(model, elastic.loader(loader))

Lightning's loops stay their own, and so do its checkpoints; a restart continues from the session's.

The callback follows Lightning's hooks and changes none of its loops. Batches come from the session's sampler. The state
of the fit loop (its counters of steps, epochs and batches), of the other callbacks and of the data module is attached
as one object, and is loaded when training begins, so `max_steps`, loggers and early stopping continue where they were.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from elasticd.checkpointing.state.training_state import StateDict
from elasticd.errors import UsageError
from elasticd.integrations import check_world_size, refuse_second_training, require
from elasticd.integrations.loader import ElasticLoader
from elasticd.session import Session, init

_SHARDING_STRATEGIES = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
_NUMBER_KEY = "__number__"


def _import_lightning(module: str) -> Any:
    """A module of `lightning`, or of `pytorch_lightning` if that is what the script has imported."""
    is_older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return require(module.replace("lightning.", "pytorch_lightning.", 1) if is_older else module, "lightning")


class ElasticdCallback:
    """A Lightning callback with a session, `session`; it resumes from the session's newest checkpoint by itself.

    An optimizer step ends, with `session.step()`, after the last hook of its batch and before a validation.

    Args:
        global_batch: samples in one optimizer step, over all ranks. It does not change with their number.
        every, keep, directory: as in `Session.checkpoint`.
        session: of the script, where `session.run` calls what makes this callback; by default one of its own.

    Raises UsageError without the package.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        base = _import_lightning("lightning.pytorch").Callback
        return object.__new__(type(cls.__name__, (cls, base), {}))

    def __init__(
        self,
        global_batch: int,
        *,
        every: Any = 50,
        keep: int = 3,
        directory: str | os.PathLike[str] | None = None,
        session: Session | None = None,
    ) -> None:
        self.session = session or init()
        self._global_batch = global_batch
        self._saves = (every, directory, keep)
        self._loader: ElasticLoader | None = None
        self._phase = ExitStack()
        self._global_step = 0
        self._fitted: Any = None
        """The trainer and its module, while the callback is theirs."""

    @property
    def environment(self) -> Any:
        """A ClusterEnvironment for `Trainer(plugins=)`: ranks and their number are the session's."""
        base = _import_lightning("lightning.fabric.plugins.environments").TorchElasticEnvironment
        session = self.session
        own = {
            "world_size": lambda _: session.world_size,
            "global_rank": lambda _: session.rank,
            "local_rank": lambda _: session.local_rank,
            "validate_settings": lambda *_, **__: None,  # the round decides, not the script
        }
        return type("ElasticdEnvironment", (base,), own)()

    def arguments(self, callbacks: Iterable[Any] = (), plugins: Iterable[Any] = ()) -> dict[str, Any]:
        """Arguments for Trainer: its callbacks and plug-ins with these, and `devices` and `num_nodes` of this round."""
        return {
            "callbacks": [*callbacks, self],
            "plugins": [*plugins, self.environment],
            "devices": int(os.environ.get("LOCAL_WORLD_SIZE", self.session.world_size)),
            "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        }

    def loader(self, loader: Any, per_rank_batch: int | None = None, seed: int = 0) -> ElasticLoader:
        """The loader for `fit()` or `train_dataloader()`: Lightning gives it no sampler of its own.

        With `per_rank_batch`, samples that fit on a rank, Trainer has to be given the loader's
        `accumulate_grad_batches=loader.sampler.accumulate`.
        """
        self._loader = ElasticLoader(loader, self._global_batch, per_rank_batch, seed)
        return self._loader

    def withdraw(self) -> None:
        """Leave trainer and module as they were: their next training is none of this session, whose group it uses."""
        if self._fitted is None:
            return
        (trainer, module), self._fitted = self._fitted, None
        trainer.callbacks.remove(self)
        module.backward = module.backward.unweighted

    # --- Lightning's hooks -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        kind = type(trainer.strategy)
        if shards := next((base.__name__ for base in kind.__mro__ if base.__name__ in _SHARDING_STRATEGIES), None):
            raise UsageError(
                f"ElasticdCallback: {shards} keeps a part of the state on every rank; leave it out, or resume from "
                "Lightning's own checkpoints"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        refuse_second_training(self._fitted is not None)
        if self._loader is None:
            raise UsageError(
                "ElasticdCallback: the training data has no elastic loader; fit(model, elastic.loader(loader))"
            )
        check_world_size(trainer.world_size, self.session.world_size, "Trainer", "give Trainer(**elastic.arguments())")
        if self._loader.sampler.accumulate != trainer.accumulate_grad_batches:
            raise UsageError(
                f"ElasticdCallback: the loader gives {self._loader.sampler.accumulate} batches for a step, and "
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) takes another number of them"
            )
        optimizers = {f"optimizer{n or ''}": optimizer for n, optimizer in enumerate(trainer.optimizers)}
        schedulers = {f"scheduler{n or ''}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(_call_closure_first)  # before the session's, which begins a change
        self.session.attach(
            model=trainer.strategy.model,
            sampler=self._loader.sampler,
            **optimizers,
            **schedulers,
            **({"scaler": scaler} if scaler is not None else {}),
            trainer=_TrainerState(trainer, self),  # last: its hooks find what was loaded before
        )
        every, directory, keep = self._saves
        resumed = self.session.restore(directory)
        self.session.checkpoint(every, directory, keep)
        if resumed is not None:
            trainer.fit_loop.reset()  # finds out at which point of its epoch it is
            begun = trainer.fit_loop.epoch_progress.total
            if begun.completed == begun.ready and hasattr(trainer.fit_loop, "reset_restart_stage"):
                trainer.fit_loop.reset_restart_stage()  # what begins is the next epoch, and not the rest of one
        self._global_step = trainer.global_step
        backward = getattr(pl_module.backward, "unweighted", pl_module.backward)

        def weighted(loss: Any, *args: Any, **options: Any) -> None:
            backward(loss * self._loss_scale(trainer), *args, **options)

        weighted.unweighted = backward  # type: ignore[attr-defined]  # a module may be fitted again
        pl_module.backward = weighted
        self._fitted = trainer, pl_module
        # Lightning's handler calls a collective from wherever the signal comes; the session's only notes it, and one
        # of the script stays.
        if threading.current_thread() is threading.main_thread():
            before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def _loss_scale(self, trainer: Any) -> float:
        assert self._loader is not None
        sampler = self._loader.sampler
        micro = trainer.fit_loop.epoch_loop.batch_idx % sampler.accumulate
        return sampler.loss_scale(micro) * sampler.accumulate  # Lightning divides by that

    def on_train_batch_start(self, *_: Any) -> None:
        self._phase.close()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self.session.step()
        if self.session.should_stop:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def on_validation_start(self, *_: Any) -> None:
        self._phase.close()
        self._phase.enter_context(self.session.phase("eval"))

    def on_validation_end(self, *_: Any) -> None:
        self.session.save_again("its validation")  # callbacks keep the result

    on_test_start = on_predict_start = on_train_end = on_validation_start

    def on_save_checkpoint(self, *_: Any) -> None:
        self._phase.close()
        self._phase.enter_context(self.session.phase("checkpoint"))


def _call_closure_first(optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Make the forward and the backward pass, which Lightning does within `optimizer.step(closure)`, before that step
    counts as begun: a rank waits for the others there. An optimizer that may call the closure again keeps it.
    """
    closure, kind = options.get("closure"), type(optimizer)
    if closure is None or not kind.__module__.startswith("torch.optim.") or kind.__name__ == "LBFGS":
        return None
    loss = closure()
    return args, {**options, "closure": lambda: loss}


class _TrainerState:
    """The positions of Lightning's loops, what its callbacks keep, and what hooks add to its checkpoints."""

    rank_independent = True

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        callbacks = [callback for callback in trainer.callbacks if callback is not own]
        hooked: list[Any] = [*((callback, (trainer, module)) for callback in callbacks), (module, ())]
        lightning = _import_lightning("lightning.pytorch")
        bases = (lightning.Callback, lightning.LightningModule)
        self._hooked = [(owner, given) for owner, given in hooked if _overrides_checkpoint_hooks(owner, bases)]
        """Whose hooks are called, in Lightning's order, and with what before the checkpoint."""
        self.only_at_saves = bool(self._hooked)

    def state_dict(self) -> StateDict:
        data = self._trainer.datamodule
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "callbacks": _pack_numbers(self._callback_states()),
            "data": _pack_numbers(data.state_dict()) if data is not None else {},
            "hooks": _pack_numbers(self._values_from_hooks()),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._trainer.fit_loop.load_state_dict(state["loops"])
        callbacks = _unpack_numbers(state["callbacks"])
        if self._hooked:
            checkpoint = {**self._checkpoint_for_hooks(), "callbacks": callbacks, **_unpack_numbers(state["hooks"])}
            for owner, given in self._hooked:
                owner.on_load_checkpoint(*given, checkpoint)
        for callback in self._trainer.callbacks:
            if callbacks.get(callback.state_key):
                callback.load_state_dict(callbacks[callback.state_key])
        if state["data"] and self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(_unpack_numbers(state["data"]))

    def _callback_states(self) -> StateDict:
        return {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}

    def _values_from_hooks(self) -> StateDict:
        """The values that hooks add to a checkpoint, or put in the place of others."""
        if not self._hooked:
            return {}
        before = self._checkpoint_for_hooks()
        checkpoint = dict(before)
        for hooked, given in self._hooked:
            hooked.on_save_checkpoint(*given, checkpoint)
        return {key: value for key, value in checkpoint.items() if value is not before.get(key)}

    def _checkpoint_for_hooks(self) -> StateDict:
        """The keys that hooks find in one of Lightning's checkpoints."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
            "callbacks": self._callback_states(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }


def _overrides_checkpoint_hooks(obj: Any, bases: tuple[Any, ...]) -> bool:
    names = ("on_save_checkpoint", "on_load_checkpoint")
    own = [getattr(type(obj), name) for name in names]
    return all(own != [getattr(base, name) for name in names] for base in bases)


def _pack_numbers(value: Any) -> Any:
    """Single numbers in tensors become Python's, which a rank can save at a fault; all else stays what it is."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return {_NUMBER_KEY: [value.item(), str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) is dict:
        return {key: _pack_numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_pack_numbers, value))
    return value.item() if hasattr(value, "dtype") and type(value).__module__ == "numpy" and not value.shape else value


def _unpack_numbers(value: Any) -> Any:
    import torch

    if type(value) is dict and value.keys() == {_NUMBER_KEY}:
        number, kind, shape = value[_NUMBER_KEY]
        return torch.tensor(number, dtype=getattr(torch, kind)).reshape(shape)
    if type(value) is dict:
        return {key: _unpack_numbers(item) for key, item in value.items()}
    return type(value)(map(_unpack_numbers, value)) if type(value) in (list, tuple) else value

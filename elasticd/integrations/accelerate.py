"""Hugging Face Accelerate in a session: a training loader that `accelerator.prepare()` leaves alone.

    loader = ElasticDataLoader(accelerator, loader)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in loader.epochs(3):
        for batch in loader:

The loop's body stays as it is. `python -m elasticd.integrations.accelerate` prints what `accelerate launch` would put
into the environment of its processes, and its nodes and processes as variables of torchrun, for `elasticd run`.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from elasticd.errors import UsageError
from elasticd.integrations import check_world_size, require
from elasticd.integrations.loader import ElasticLoader, batch_sampler_of
from elasticd.session import Session, init

logger = logging.getLogger("elasticd")


class ElasticDataLoader(ElasticLoader):
    """The training loader of a script with an Accelerator; it has a session, `session`.

    When its first epoch begins, what the accelerator has prepared or registered for checkpointing is attached and
    restored. An optimizer step ends, with `session.step()`, when the loop asks for the batch after it. Once all ranks
    have decided to stop, there are no more batches and no more epochs. Batches are on the accelerator's device.

    Args:
        accelerator: what the script trains with; its `backward()` weights the losses of uneven batches from here on.
        loader: the script's DataLoader, before `prepare()`.
        global_batch: samples in one optimizer step, over all ranks; by default what the batch size and the
            accelerator's `gradient_accumulation_steps` make of the present number of ranks. Give it where that number
            may change; the learning rate then follows the schedule as if it never had.
        every, keep, directory: as in `Session.checkpoint`.
        session: of the script, where `session.run` calls what makes the accelerator; by default one of its own.

    Raises UsageError for plug-ins that keep a part of the state on every rank, and without the package.
    """

    def __init__(
        self,
        accelerator: Any,
        loader: Any,
        *,
        global_batch: int | None = None,
        every: Any = 50,
        keep: int = 3,
        directory: str | os.PathLike[str] | None = None,
        session: Session | None = None,
    ) -> None:
        kinds = require("accelerate.utils", "accelerate").DistributedType
        if accelerator.distributed_type in (kinds.DEEPSPEED, kinds.FSDP, kinds.MEGATRON_LM):
            raise UsageError(
                f"ElasticDataLoader: {accelerator.distributed_type.value} keeps a part of the state on every rank; "
                "resume from accelerator.save_state() and load_state(), or train with DistributedDataParallel"
            )
        meshes = getattr(accelerator, "parallelism_config", None)
        if meshes is not None and meshes.non_data_parallel_size > 1:
            raise UsageError(
                "ElasticDataLoader: tensor, context and sequence parallelism share batches; leave them out"
            )
        self.session = session or init()
        self.session.at_entry(reload_ranks)
        ranks = self.session.world_size
        check_world_size(accelerator.num_processes, ranks, "Accelerator", "on CPUs, give Accelerator(cpu=True)")
        accumulates = accelerator.gradient_accumulation_steps
        batch_size = batch_sampler_of(loader).batch_size
        self._per_step = batch_size * accumulates
        batch = global_batch or self._per_step * ranks
        # A loop without accumulation ends a step with every batch.
        super().__init__(loader, batch, batch_size if accumulates > 1 else None)
        accelerator.gradient_accumulation_steps = self.sampler.accumulate
        self._accelerator = accelerator
        self._saves = (every, directory, keep)
        self._begun = False
        self._micro: int | None = None
        """The micro-batch that the loop trains on; None outside of an iteration."""
        self._outside = ExitStack()
        """The code between two iterations makes no steps."""
        self._backward = accelerator.backward
        accelerator.backward = self._weighted_backward

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, in place of `range(count)`."""
        self._attach_restore_and_checkpoint()
        for epoch in super().epochs(count):
            if self.session.should_stop:
                return
            yield epoch
            self._end_left_step()  # before the cursor goes to the next epoch

    def __iter__(self) -> Iterator[Any]:
        self._attach_restore_and_checkpoint()
        send = require("accelerate.utils", "accelerate").send_to_device
        self._outside.close()
        self._end_left_step()
        micro = -1
        try:
            for batch in super().__iter__():
                micro = (micro + 1) % self.sampler.accumulate
                if self._micro is not None and micro == 0:
                    self.session.step()
                    if self.session.should_stop:
                        break
                self._micro = micro
                yield send(batch, self._accelerator.device, non_blocking=True)
            else:
                if self._micro is not None:
                    self.session.step()
            self._micro = None
        finally:
            self._outside.enter_context(self.session.phase("eval"))

    def _end_left_step(self) -> None:
        """End the step after which the loop has left its iteration; its last batch may also be one that it only saw."""
        if self._micro == self.sampler.accumulate - 1 and self.session.has_optimized:
            self.session.step()
        self._micro = None

    def _attach_restore_and_checkpoint(self) -> None:
        if self._begun:
            return
        self._begun = True
        own = self._accelerator
        optimizers = [prepared.optimizer for prepared in own._optimizers]
        schedulers = [self._tie_to_global_batch(scheduler) for scheduler in own._schedulers]
        scaler = {"scaler": own.scaler} if own.scaler is not None else {}
        kinds = {"model": own._models, "optimizer": optimizers, "scheduler": schedulers, "object": own._custom_objects}
        named = {f"{kind}{n or ''}": part for kind, parts in kinds.items() for n, part in enumerate(parts)}
        forget_preparation(own._models)
        if not own._models or not optimizers:
            raise UsageError("ElasticDataLoader: accelerator.prepare(model, optimizer, ...) first, then iterate")
        if own._save_model_state_pre_hook and not own._custom_objects and self.session.rank == 0:
            logger.warning(
                "the hooks of register_save_state_pre_hook() are not called: what only they save, such as averaged "
                "weights, begins anew at a restart unless accelerator.register_for_checkpointing() gets it"
            )
        self.session.attach(**named, **scaler, sampler=self.sampler)
        every, directory, keep = self._saves
        self.session.restore(directory)
        self.session.checkpoint(every, directory, keep)

    def _tie_to_global_batch(self, scheduler: Any) -> Any:
        """Accelerate steps a schedule once for each process: from here on, for as many as the global batch stands for.

        Returns the schedule itself.
        """
        if scheduler.split_batches or not scheduler.step_with_optimizer:
            return scheduler.scheduler
        times, left = divmod(self.sampler.global_batch, self._per_step)
        if left:
            raise UsageError(
                f"ElasticDataLoader(global_batch={self.sampler.global_batch}): Accelerate steps the schedule once for "
                f"each {self._per_step} samples; give a multiple of that"
            )
        scheduler.split_batches = True
        inner, scheduler.scheduler = scheduler.scheduler, _RepeatedSchedule(scheduler.scheduler, times)
        return inner

    def _weighted_backward(self, loss: Any, **options: Any) -> None:
        if self._micro is not None:
            loss = loss * self.sampler.loss_scale(self._micro) * self.sampler.accumulate  # Accelerate divides by that
        self._backward(loss, **options)


def reload_ranks() -> None:
    """Accelerate keeps rank and world size for the whole process: have it read those of the round again."""
    state = require("accelerate.state", "accelerate")
    is_on_cpu = state.PartialState().device.type == "cpu"
    state.GradientState._reset_state()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.PartialState(cpu=is_on_cpu)


def forget_preparation(models: Iterable[Any]) -> None:
    """A model that a single rank has prepared would not be wrapped for several, when it is prepared again."""
    for model in models:
        vars(model).pop("_is_accelerate_prepared", None)


class _RepeatedSchedule:
    """A schedule that steps several times for each `step()`."""

    def __init__(self, scheduler: Any, times: int) -> None:
        self._scheduler, self._times = scheduler, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **options: Any) -> None:
        for _ in range(self._times):
            self._scheduler.step(*args, **options)


_TORCHRUN_OPTIONS = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
"""Options of torchrun that `accelerate launch` derives from its own."""


def main(arguments: list[str]) -> None:
    """Print `export` lines of what `accelerate launch ARGUMENTS` adds to the environment of its processes, and of the
    nodes and processes that it would start, as the `PET_` variables of torchrun's options."""
    launch = require("accelerate.commands.launch", "accelerate")
    options = launch.launch_command_parser().parse_args([*arguments, "script"])
    options, defaults, has_precision = launch._validate_launch_command(options)
    has_port = options.num_machines > 1 or options.main_process_port is not None
    environments = require("accelerate.utils.launch", "accelerate")
    if options.use_deepspeed and not options.cpu:
        configured = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if has_precision else [])]
        options.deepspeed_fields_from_accelerate_config = ",".join(configured)
        options.deepspeed_multinode_launcher = "standard"  # torchrun's, on each node
        _, environment = environments.prepare_deepspeed_cmd_env(options)
    else:
        environment = environments.prepare_multi_gpu_env(options)
    if options.cpu or getattr(options, "use_cpu", False):
        environment["ACCELERATE_USE_CPU"] = "True"
    found = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    for name in _TORCHRUN_OPTIONS:
        value = getattr(options, name, None)
        if value not in (None, "") and (has_port or name == "nproc_per_node"):
            found[f"PET_{name.upper()}"] = str(value)
    for name, value in sorted(found.items()):
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main(sys.argv[1:])

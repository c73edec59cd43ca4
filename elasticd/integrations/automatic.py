"""Callbacks without a line in the script, for `elasticd run --integrate auto`.

The launcher calls `integrate` when the script has imported a framework's module. From then on `Trainer.train` and
`Trainer.fit` add the callback that the script could add itself, with its defaults. A trainer that has one is left
alone, as are a version that is not known and a trainer that the callback refuses; the reason is one sentence on rank 0.

A script without a line does not ask `session.should_stop`. After a stop the training ends early, and what follows would
take the unfinished model for the result: the process ends there, as it does under torchrun.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from elasticd.errors import UsageError
from elasticd.integrations import check_world_size

TESTED_MAJOR_VERSIONS = {"transformers": 5, "lightning": 2, "pytorch_lightning": 2}
"""The major versions that tests/frameworks has tried."""
_SECOND_TRAINING = "this process has trained already, and its checkpoints are those of that training"
ended_trainings: list[Any] = []
"""The callbacks of those that have ended: a further one would take their checkpoints for its own."""


def integrate(module: Any) -> None:
    """Let the framework of this module, which has just been imported, add its callback."""
    package = module.__name__.partition(".")[0]
    if package == "accelerate":
        _wrap_method(module.Accelerator, "prepare", _prepare)
        return
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of no version"
    if found.partition(".")[0] != str(TESTED_MAJOR_VERSIONS[package]):
        say_once(f"{package} {found} is left alone: only version {TESTED_MAJOR_VERSIONS[package]} is tested")
    elif package == "transformers":
        _wrap_method(module.Trainer, "train", _train)
    else:
        _wrap_method(module.Trainer, "fit", _fit)


def _wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(original, self, …)` stand for a method of the class."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return around(original, self, *args, **options)

    setattr(owner, name, method)


def _train(original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    from torch.utils.data import IterableDataset

    from elasticd.integrations.transformers import ElasticdCallback

    _withdraw_ended()
    if any(isinstance(callback, ElasticdCallback) for callback in trainer.callback_handler.callbacks):
        return original(trainer, *args, **options)
    try:
        if ended_trainings:
            raise UsageError(_SECOND_TRAINING)
        if isinstance(trainer.train_dataset, IterableDataset) or trainer.train_dataset is None:
            raise UsageError("its training data is a stream")
        elastic = ElasticdCallback(trainer)
    except UsageError as error:
        say_once(f"Trainer is left alone: {error}")
        return original(trainer, *args, **options)
    # A subclass may have come here from a `train` of its own, which must not begin again.
    elastic._original["train"] = functools.partial(original, trainer)
    elastic.give_back("train")  # the next training comes here, too
    trainer.add_callback(elastic)
    result = elastic._train(*args, **options)
    _exit_if_stopped(elastic.session)
    ended_trainings.append(elastic)
    return result


def _fit(
    original: Callable[..., Any], trainer: Any, model: Any, train_dataloaders: Any = None, *args: Any, **options: Any
) -> Any:
    from torch.utils.data import DataLoader

    from elasticd.integrations.lightning import ElasticdCallback
    from elasticd.integrations.loader import ElasticLoader, batch_sampler_of

    _withdraw_ended()
    if isinstance(train_dataloaders, ElasticLoader) or any(
        isinstance(callback, ElasticdCallback) for callback in trainer.callbacks
    ):
        return original(trainer, model, train_dataloaders, *args, **options)
    try:
        if ended_trainings:
            raise UsageError(_SECOND_TRAINING)
        if not isinstance(train_dataloaders, DataLoader):
            raise UsageError("fit(model, loader) is given no DataLoader for training")
        accumulates, size = trainer.accumulate_grad_batches, batch_sampler_of(train_dataloaders).batch_size
        elastic = ElasticdCallback(size * accumulates * trainer.world_size)
        elastic.setup(trainer)
        check_world_size(
            trainer.world_size, elastic.session.world_size, "Trainer", "give Trainer(devices=, num_nodes=)"
        )
        loader = elastic.loader(train_dataloaders, size if accumulates > 1 else None)
    except UsageError as error:
        say_once(f"Lightning's Trainer is left alone: {error}")
        return original(trainer, model, train_dataloaders, *args, **options)
    trainer.callbacks.append(elastic)
    result = original(trainer, model, loader, *args, **options)
    _exit_if_stopped(elastic.session)
    ended_trainings.append(elastic)
    return result


def _withdraw_ended() -> None:
    for elastic in ended_trainings:
        elastic.withdraw()


def _prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    # An ElasticDataLoader is no DataLoader.
    has_loader = any(isinstance(one, DataLoader) for one in args) and not _has_elastic_loader(args)
    if has_loader and not _is_called_by_trainer(sys._getframe(2)):
        say_once(
            "Accelerate is left alone: its loop is the script's, and counts epochs from 0 after a restart; "
            "ElasticDataLoader and loader.epochs() are three lines (elasticd docs frameworks)"
        )
    return original(accelerator, *args, **options)


def _is_called_by_trainer(frame: Any) -> bool:
    """True also for a subclass that makes its loader by itself."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("transformers.", "elasticd.integrations.transformers")):
            return True
        frame = frame.f_back
    return False


def _has_elastic_loader(args: tuple[Any, ...]) -> bool:
    from elasticd.integrations.loader import ElasticLoader

    return any(isinstance(one, ElasticLoader) for one in args)


def _exit_if_stopped(session: Any) -> None:
    """The script asks nobody whether the training has ended early."""
    if session.should_stop:
        say_once(f"the job stops at step {session.steps}: the script ends here, before it takes the model for finished")
        session.close()
        sys.exit(0)


@functools.cache
def say_once(text: str) -> None:
    """Print a sentence on rank 0, once."""
    if os.environ.get("RANK", "0") == "0":
        print(f"elasticd: --integrate auto: {text}", file=sys.stderr, flush=True)

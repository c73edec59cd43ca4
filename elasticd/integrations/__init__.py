"""The session in other training loops: Hugging Face Trainer, Accelerate, Lightning, torchdata's loaders.

Each module is for one package, which it imports when it is first called and not before.
"""

from __future__ import annotations

import importlib
from typing import Any

from elasticd.errors import UsageError


def check_world_size(theirs: int, ours: int, what: str, instead: str) -> None:
    """Raises UsageError where a framework has another number of ranks than the session: each would train alone."""
    if theirs != ours:
        raise UsageError(f"{what} counts {theirs} ranks, and the session {ours}: {instead}")


def refuse_second_training(has_trained: bool) -> None:
    """Raises UsageError where a callback is used once more: the session's checkpoints are of its first training."""
    if has_trained:
        raise UsageError(
            "an ElasticdCallback keeps the state of one training. Call its withdraw(), and the next training is left "
            "alone; or make that one a job of its own"
        )


def require(package: str, extra: str) -> Any:
    """The package, imported. Raises UsageError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"elasticd.integrations.{extra} needs {package} ({error}): pip install 'elasticd[{extra}]'"
        ) from error

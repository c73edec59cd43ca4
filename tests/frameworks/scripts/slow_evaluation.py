"""EXAMPLE with an evaluation of SLOW seconds on every rank, and saves that take rank 0 as long."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SLOW_S = float(os.environ["SLOW"])


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(function)  # Lightning looks at the signature
    def run(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return run


def main() -> None:
    name = sys.argv.pop(1)
    example = importlib.import_module(f"examples.{name}")
    of_rank_0 = SLOW_S if os.environ["RANK"] == "0" else 0.0
    if name == "accelerate_loop":
        accelerator = example.Accelerator
        accelerator.print = slowed(accelerator.print, SLOW_S)  # after each epoch
        accelerator.save_model = slowed(accelerator.save_model, of_rank_0)
    else:
        from lightning.fabric.plugins.io import TorchCheckpointIO

        model = example.Regression
        model.validation_step = slowed(model.validation_step, SLOW_S / 2)  # each rank has two batches
        TorchCheckpointIO.save_checkpoint = slowed(TorchCheckpointIO.save_checkpoint, of_rank_0)
    example.main()


if __name__ == "__main__":
    main()

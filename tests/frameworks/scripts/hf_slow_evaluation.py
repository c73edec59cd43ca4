"""examples/hf_trainer.py with an evaluation that takes SLOW seconds (2), and so does a save if SLOW is given."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers

from examples import hf_trainer

SLOW_S = float(os.environ.get("SLOW", 2))


class Slow(hf_trainer.Counting):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.samples == 64:
            if index == 0:
                print("an evaluation begins", flush=True)
            time.sleep(SLOW_S / 32)  # each of two ranks has half of the samples
        return super().__getitem__(index)


class SlowToSave(transformers.Trainer):
    def save_model(self, *args: Any, **options: Any) -> None:
        if "SLOW" in os.environ and self.args.should_save:
            time.sleep(SLOW_S)
        super().save_model(*args, **options)


if __name__ == "__main__":
    hf_trainer.Counting = Slow  # type: ignore[misc]
    hf_trainer.Trainer = SlowToSave  # type: ignore[misc]
    hf_trainer.main()

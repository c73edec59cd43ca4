"""examples/hf_trainer.py with an evaluation of two seconds, which says when it begins."""

from __future__ import annotations

import time

import torch

from examples import hf_trainer


class Slow(hf_trainer.Counting):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.samples == 64:
            if index == 0:
                print("an evaluation begins", flush=True)
            time.sleep(0.05)
        return super().__getitem__(index)


if __name__ == "__main__":
    hf_trainer.Counting = Slow  # type: ignore[misc]
    hf_trainer.main()

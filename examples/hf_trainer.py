"""Hugging Face Trainer on a small GPT-2, made from its configuration: the lines with `elastic` are elasticd's.

    elasticd run --nproc-per-node 2 --checkpoint-dir DIR --preload transformers examples/hf_trainer.py

Without them it is a plain Trainer script. With them it still runs under torchrun, and as plain `python`.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from elasticd.integrations.transformers import ElasticdCallback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, each from another number."""

    def __init__(self, samples: int, length: int = 16) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(self.length) + index) % 64
        return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints for restarts")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--output", default="hf-output")
    options = parser.parse_args()
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=options.output,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        num_train_epochs=options.epochs,
        eval_strategy="epoch",
        save_steps=100,
        logging_steps=10,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(options.samples), eval_dataset=Counting(64))
    elastic = ElasticdCallback(trainer, global_batch=16, every=options.every)
    trainer.add_callback(elastic)
    trainer.train()
    if not elastic.session.should_stop:
        trainer.save_model(f"{options.output}/final")


if __name__ == "__main__":
    main()

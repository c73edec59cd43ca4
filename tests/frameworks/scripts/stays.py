"""A framework's own loop in `session.run`: `stays.py FRAMEWORK --output FOLDER`. The model is the processes' own."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticd

parser = argparse.ArgumentParser()
parser.add_argument("framework")
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
options.output.mkdir(exist_ok=True)
session = elasticd.init()
torch.manual_seed(0)


def with_transformers() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from elasticd.integrations.transformers import ElasticdCallback
    from examples.hf_trainer import Counting

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def train() -> Any:
        chosen = {"save_strategy": "no", "logging_steps": 10, "eval_strategy": "epoch", "disable_tqdm": True}
        arguments = TrainingArguments(
            str(options.output), use_cpu=True, num_train_epochs=options.epochs, per_device_train_batch_size=4, **chosen
        )
        trainer = Trainer(model, arguments, train_dataset=Counting(1000), eval_dataset=Counting(64))
        trainer.add_callback(ElasticdCallback(trainer, global_batch=16, every=5, session=session))
        trainer.train()
        steps = [line["step"] for line in trainer.state.log_history if "loss" in line]
        assert len(steps) == len(set(steps)), steps
        return trainer.model

    return train


def with_accelerate() -> Any:
    from accelerate import Accelerator

    from elasticd.integrations.accelerate import ElasticDataLoader

    x = torch.randn(1000, 8)
    dataset = TensorDataset(x, x.sin())
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 8))

    def train() -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=400)
        loader: Any = DataLoader(dataset, batch_size=4, shuffle=True)
        loader = ElasticDataLoader(accelerator, loader, global_batch=16, every=5, session=session)
        model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
        for _ in loader.epochs(options.epochs):
            model.train()
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            model.eval()
            accelerator.gather_for_metrics(model(dataset[:10][0]))
        return net

    return train


def with_lightning() -> Any:
    import lightning

    from elasticd.integrations.lightning import ElasticdCallback
    from examples.lightning_fit import Regression

    x = torch.randn(1064, 8)
    training, validation = TensorDataset(x[64:], x[64:].sin()), TensorDataset(x[:64], x[:64].sin())
    module = Regression()

    def train() -> Any:
        elastic = ElasticdCallback(global_batch=16, every=5, session=session)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(
            max_epochs=options.epochs, default_root_dir=options.output, **quiet, **elastic.arguments()
        )
        loader: Any = elastic.loader(DataLoader(training, batch_size=8, shuffle=True))
        trainer.fit(module, loader, DataLoader(validation, 16))
        return module

    return train


train = globals()[f"with_{options.framework}"]()


def enter() -> Any:
    with (options.output / "entered").open("a") as file:
        file.write(json.dumps([session.round, session.rank, session.world_size, os.getpid()]) + "\n")
    return train()


trained = session.run(enter)
if session.rank == 0:
    torch.save(trained.state_dict(), options.output / "final.pt")
session.close()

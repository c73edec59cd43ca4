"""A loop with Hugging Face Accelerate: the lines with `Elastic` and `epochs` are elasticd's, the others Accelerate's.

elasticd run --nproc-per-node 2 --checkpoint-dir DIR --preload accelerate examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticd.integrations.accelerate import ElasticDataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output", default="accelerate-output")
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=options.accumulate)
    x = torch.randn(options.samples, 8)
    dataset = TensorDataset(x, x.sin())
    loader = DataLoader(dataset, batch_size=16 // options.accumulate // 2, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.epochs * len(loader))

    loader = ElasticDataLoader(accelerator, loader, global_batch=16, every=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in loader.epochs(options.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} has ended", flush=True)

    if not loader.session.should_stop:
        accelerator.save_model(model, options.output)


if __name__ == "__main__":
    main()

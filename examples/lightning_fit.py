"""A LightningModule and its Trainer: the lines with `elastic` are elasticd's, the others Lightning's.

elasticd run --nproc-per-node 2 --checkpoint-dir DIR --preload lightning examples/lightning_fit.py
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticd.integrations.lightning import ElasticdCallback


class Regression(lightning.LightningModule):
    """The sine of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="lightning-output")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(options.samples + 64, 8)
    training, validation = TensorDataset(x[64:], x[64:].sin()), TensorDataset(x[:64], x[:64].sin())
    model = Regression()

    elastic = ElasticdCallback(global_batch=16, every=20)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        default_root_dir=options.output,
        enable_progress_bar=False,
        logger=False,
        **elastic.arguments(),
    )
    trainer.fit(model, elastic.loader(DataLoader(training, batch_size=8, shuffle=True)), DataLoader(validation, 16))
    if not elastic.session.should_stop:
        trainer.save_checkpoint(f"{options.output}/final.ckpt")


if __name__ == "__main__":
    main()

"""Three real processes under DDP, with a last batch too small for all of them, against one process alone."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elasticd.sampler import ElasticBatchSampler
from elasticd.shuffle import Permutation

WORLD_SIZE, SAMPLES, GLOBAL_BATCH, EPOCHS = 3, 18, 8, 2  # steps of 8, 8 and 2 samples: in the last, rank 2 has none
ACCUMULATE = (1, 2)
DEADLINE = 60.0


def problem() -> tuple[TensorDataset, torch.nn.Linear, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(SAMPLES, 3, dtype=torch.float64, generator=generator)
    y = torch.rand(SAMPLES, 1, dtype=torch.float64, generator=generator)
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 1).double()
    return TensorDataset(x, y), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_alone() -> torch.Tensor:
    dataset, model, optimizer = problem()
    x, y = dataset.tensors
    for epoch in range(EPOCHS):
        order = Permutation(SAMPLES, 0, epoch).at(list(range(SAMPLES)))
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            batch = order[start : start + GLOBAL_BATCH]
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x[batch]), y[batch]))
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def trained_together(accumulate: int) -> torch.Tensor:
    dataset, model, optimizer = problem()
    ddp = DistributedDataParallel(model)
    sampler = ElasticBatchSampler(dataset, GLOBAL_BATCH, accumulate=accumulate)
    workers = 1 if dist.get_rank() == 1 else 0  # this rank fetches ahead of the others
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            micro = number % accumulate
            with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                torch.autograd.backward(torch.nn.functional.mse_loss(ddp(x), y) * sampler.loss_scale(micro))
            if micro == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
                sampler.commit()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def worker(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    torch.save([trained_together(accumulate) for accumulate in ACCUMULATE], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_three_ddp_processes_train_as_one(start: Any, tmp_path: Path) -> None:
    job = start(__file__, str(tmp_path), world_size=WORLD_SIZE)
    assert job.codes(DEADLINE) == [0] * WORLD_SIZE, [rank.errors() for rank in job.ranks]
    alone = trained_alone()
    for rank in range(WORLD_SIZE):
        for together in torch.load(tmp_path / f"rank{rank}.pt"):
            torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))

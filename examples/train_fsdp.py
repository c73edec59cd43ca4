"""Train a sharded model (FSDP2): each rank keeps a part of the parameters and of the optimizer's state, and saves it.

    elasticd run --nproc-per-node 4 --checkpoint-dir checkpoints examples/train_fsdp.py
    elasticd run --nproc-per-node 3 --checkpoint-dir checkpoints examples/train_fsdp.py --steps 600   # continues with 3

With `--replicas 2` the model is sharded over half of the ranks, and the other half has copies (HSDP).
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elasticd


def main() -> None:
    args = parse_args()
    session = elasticd.init()
    torch.manual_seed(0)  # the same initial parameters on all ranks
    model = nn.Sequential(*(Block(args.width) for _ in range(args.blocks)), nn.Linear(args.width, 1))
    shape = (args.replicas, session.world_size // args.replicas)
    mesh = init_device_mesh(session.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made from the sharded parameters

    inputs = torch.randn(4096, args.width, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=48)
    session.attach(model=model, optimizer=optimizer, sampler=sampler).restore()
    session.checkpoint(every=args.checkpoint_every)

    while session.steps < args.steps and not session.should_stop:
        for x, y in DataLoader(dataset, batch_sampler=sampler):
            loss = nn.functional.mse_loss(model(x.to(session.device)), y.to(session.device)) * sampler.loss_scale()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            if session.rank == 0 and session.steps % 20 == 0:
                print(f"step {session.steps}  loss {loss.item():.4f}", flush=True)
            if session.should_stop or session.steps >= args.steps:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    if not session.should_stop:
        session.save()  # an interval's save is left out while an earlier one is being written
    session.close()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all (default %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()

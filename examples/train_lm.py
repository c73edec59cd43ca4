"""Train a byte-level GPT of about a million parameters on real text, and lose nothing when a worker dies.

The text is the Python standard library's own source, found on the machine, or any file given by --text. The same
script runs under `elasticd run --checkpoint-dir DIR`, and with ELASTICD_CHECKPOINT_DIR=DIR under torchrun or as plain
`python examples/train_lm.py`. Everything elastic is in the lines that mention `session` or `sampler`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticd

BYTES = 256  # the vocabulary: every byte is a token


def main() -> None:
    args = parse_args()
    session = elasticd.init()
    torch.manual_seed(args.seed)
    windows = ByteWindows(read_text(args.text, args.megabytes), args.context)
    sampler = elasticd.ElasticBatchSampler(windows, global_batch=args.global_batch, seed=args.seed, drop_last=True)
    loader = DataLoader(windows, batch_sampler=sampler)
    model = DistributedDataParallel(GPT(args.width, args.blocks, args.heads, args.context).to(session.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warmup_then_cosine, steps=args.steps))
    settle_buckets(model, args.context, session.device)

    session.attach(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler)
    session.restore()
    session.checkpoint(every=args.checkpoint_every)
    log = LossLog(args.loss_log if session.rank == 0 else None)
    if session.rank == 0:
        million = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"round {session.round}: {million:.2f} M parameters, continues from step {session.steps}", flush=True)

    for x, y in endless(loader, sampler):
        if session.should_stop or session.steps >= args.steps:
            break
        x, y = x.to(session.device), y.to(session.device)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * sampler.loss_scale()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mean = mean_over_ranks(loss)
        # From here to session.step() a rank waits for no other one: so it can save its state when another one dies.
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # Logged before the step is committed: a kill in between repeats a line, the other order would lose one.
        step = session.steps + 1
        session.log(loss=mean)
        log.append(step=step, loss=mean, world_size=session.world_size, round=session.round, mono=time.monotonic())
        if session.rank == 0 and (step % args.print_every == 0 or step == args.steps):
            print(f"step {step:>5}  loss {mean:.4f}", flush=True)
        session.step()

    session.close()


class GPT(nn.Module):
    """A small causal transformer over bytes: (batch, time) integers in, (batch, time, 256) logits out."""

    def __init__(self, width: int, blocks: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(small_weights)
        self.head.weight = self.token.weight  # tied, as in GPT-2: one table reads and writes bytes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal self-attention and a four times wider MLP, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


def small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Back-to-back windows of a text: the bytes, and the same bytes one further on as the targets."""

    def __init__(self, text: bytearray, context: int) -> None:
        self.bytes, self.context = torch.frombuffer(text, dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def read_text(path: Path | None, megabytes: float) -> bytearray:
    """The file's bytes, or those of the standard library's modules in the order of their names, up to a bound."""
    folder = Path(sysconfig.get_path("stdlib"))
    limit, text = int(megabytes * 1e6), bytearray()
    for source in [path] if path else sorted(folder.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise SystemExit(f"train_lm: no text to train on: {path or folder} holds none; give one with --text FILE")
    return text[:limit]


def endless(loader: DataLoader[tuple[Tensor, Tensor]], sampler: elasticd.ElasticBatchSampler) -> Iterator[list[Tensor]]:
    """Epoch after epoch, the first from wherever the restored sampler stands."""
    while True:
        yield from loader
        sampler.set_epoch(sampler.epoch + 1)


def warmup_then_cosine(step: int, *, steps: int, warmup: int = 30) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def settle_buckets(model: DistributedDataParallel, context: int, device: torch.device) -> None:
    """One throw-away backward pass, so that a resumed run equals the uninterrupted one bit for bit.

    DDP re-orders its gradient buckets once, after the first backward of a process. The order decides how the floats of
    more than two ranks are summed: without this, the first step after a restart is rounded differently.
    """
    model(torch.zeros(1, min(8, context), dtype=torch.long, device=device)).sum().backward()
    model.zero_grad()


def mean_over_ranks(loss: Tensor) -> float:
    """The loss over the global batch: the scaled losses average to it, as the gradients do."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class LossLog:
    """One JSON object a line, each written by a single append, so that a kill never leaves half a line."""

    def __init__(self, path: Path | None) -> None:
        self.file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, **fields: float) -> None:
        if self.file is not None:
            os.write(self.file, (json.dumps(fields) + "\n").encode())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=32, help="windows a step, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes a window")
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="train on this file instead of the standard library's source")
    parser.add_argument("--megabytes", type=float, default=1.0, help="read no more text than this")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--loss-log", type=Path, help="rank 0 appends one JSON object a step to this file")
    parser.add_argument("--print-every", type=int, default=25, help="steps between printed lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()

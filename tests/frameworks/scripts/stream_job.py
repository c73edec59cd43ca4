"""Trains from a StatefulDataLoader of each rank, which writes each step's samples to a file before it commits them."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import elasticd
from elasticd.integrations.torchdata import RankLoader


class Stream(IterableDataset[int]):
    """This rank's part of the numbers below `samples`, shared by its loader's workers."""

    def __init__(self, samples: int, rank: int, ranks: int) -> None:
        self.samples, self.rank, self.ranks = samples, rank, ranks

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(self.rank + self.ranks * part, self.samples, self.ranks * parts))


def tar_files(folder: Path, samples: int) -> object:
    """A WebDataset of 12 files, which the ranks and their loaders' workers share."""
    import webdataset

    shards = folder.parent / "shards"
    if not shards.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for shard in range(12):
            with webdataset.TarWriter(str(made / f"{shard:02}.tar")) as tar:
                for number in range(shard, samples, 12):
                    tar.write({"__key__": f"{number:06}", "number.txt": str(number)})
        with contextlib.suppress(OSError):  # another rank was first
            made.rename(shards)
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    return dataset.map(lambda sample: int(sample["number.txt"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("stream", "webdataset", "map"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    session = elasticd.init()
    options.output.mkdir(exist_ok=True)
    if options.kind == "webdataset":
        own = StatefulDataLoader(tar_files(options.output, options.samples), batch_size=4, num_workers=options.workers)
    elif options.kind == "stream":
        dataset: object = Stream(options.samples, session.rank, session.world_size)
        own = StatefulDataLoader(dataset, batch_size=4, num_workers=options.workers)
    else:
        sampler = StatefulDistributedSampler(range(options.samples))
        own = StatefulDataLoader(range(options.samples), batch_size=4, num_workers=options.workers, sampler=sampler)
    loader = RankLoader(own)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.attach(model=model, optimizer=optimizer, per_rank={"loader": loader})
    session.restore()
    session.checkpoint(every=5)
    for epoch in loader.epochs(2):
        for batch in loader:
            model(batch.float().unsqueeze(1) / options.samples).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            line = {"step": session.steps + 1, "round": session.round, "epoch": epoch, "samples": batch.tolist()}
            with (options.output / f"rank-{session.rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            session.step()
            if session.should_stop:
                return


if __name__ == "__main__":
    main()

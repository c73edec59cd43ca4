"""The steps of a job of `in_place_job.py` again, by processes of plain torch, without an agent and without a fault.

    python -m benchmarks.scripts.in_place_replay MEGABYTES '[[1, 40, 3], [41, 44, 2], ...]'

For each part of the run, first and last step and world size, a group of so many processes is forked, which continue
with rank 0's state of the part before. Prints a JSON object of steps and hashes, as the job writes them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.in_place_job import BATCH, SAMPLES, SEED, Net, Samples, digest
from elasticd import ElasticBatchSampler


def train(rank: int, world: int, first: int, last: int, megabytes: float, folder: Path) -> None:
    """One rank of one part."""
    store = FileStore(str(folder / f"store-{first}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(1)
    net = Net(megabytes)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = folder / "state.pt"
    if state.exists():
        saved = torch.load(state)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    dist.barrier()  # all have read it
    data = Samples(SAMPLES)
    sampler = ElasticBatchSampler(data, global_batch=BATCH, seed=SEED, rank=rank, world_size=world)
    epoch, batches, hashes = -1, list[list[int]](), {}
    for step in range(first, last + 1):
        at, index = divmod(step - 1, SAMPLES // BATCH)
        if at != epoch:
            epoch = at
            sampler.set_epoch(epoch)
            batches = list(sampler)
        loss = model(torch.stack([data[sample][0] for sample in batches[index]]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes[step] = digest(optimizer)
    if rank == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, state)
        (folder / f"hashes-{first}.json").write_text(json.dumps(hashes))
    dist.barrier()


def main() -> None:
    megabytes, parts = float(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for first, last, world in parts:
            pids = []
            for rank in range(world):
                if not (pid := os.fork()):
                    code = 1
                    try:
                        train(rank, world, first, last, megabytes, folder)
                        code = 0
                    finally:
                        os._exit(code)
                pids.append(pid)
            codes = [os.waitpid(pid, 0)[1] for pid in pids]
            if any(codes):
                raise SystemExit(f"steps {first} to {last} could not be trained again")
            found.update(json.loads((folder / f"hashes-{first}.json").read_text()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

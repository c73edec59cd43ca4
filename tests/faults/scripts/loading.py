"""Trains from a DataLoader with workers. After SIGTERM it trains some more batches, as to the end of an accumulation,
and saves; `how` says whether it has a handler of its own or a session.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import faults
import torch
from torch.utils.data import DataLoader, Dataset

import elasticd

MORE = 50


class Data(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def main(how: str) -> None:
    stopped: list[int] = []
    session: Any = None
    if how == "session":
        session = elasticd.init()
    else:
        signal.signal(signal.SIGTERM, lambda signum, frame: stopped.append(signum))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    more = 0
    for step, batch in enumerate(DataLoader(Data(), batch_size=2, num_workers=2), start=1):
        model(batch).mean().backward()
        optimizer.step()
        time.sleep(0.005)
        if session is not None:
            session.step()
        faults.finished(step)
        if stopped or (session is not None and session.should_stop):
            more += 1
            if more == MORE:
                faults.write(f"saved-{faults.RANK}", f"{step}\n")
                return


if __name__ == "__main__":
    main(sys.argv[1])

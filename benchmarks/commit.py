"""`python -m benchmarks.commit [--gpu]`: what `session.step()` costs for the sake of saves at a fault, without a job.

Times what a donor does at a commit (random states, buffers, small objects, learning rates, counters and pieces of
tensors) for models of several sizes, in this process, and what looks for changes between `session.step()` and the next
batch; medians of 2000 commits, in microseconds of the training thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

COMMITS = 2000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    device = "cuda:0" if parser.parse_args(argv).gpu else "cpu"
    import torch
    from torch import nn

    torch.set_num_threads(1)
    small = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(40)]
    normed = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(20)]
    models = {"3 layers": small, "160 parameters": nn.Sequential(*blocks), "20 BatchNorms": nn.Sequential(*normed)}
    for name, model in models.items():
        for more in ("", "a scheduler", "an object", "dropout", "numpy's draws"):
            whole, step, end, numbers = commits(model.to(device), more, torch.device(device))
            what = f"{name:<16}{f' and {more}' if more else '':<18}"
            print(f"{what} {whole:6.1f} µs, {step:.1f} in step(), {end:.1f} for the end of a step   {numbers}")
    return 0


def commits(model: Any, more: str, device: Any) -> tuple[float, float, float, str]:
    """The medians of a whole commit, of what `session.step()` has of it, of what looks for late changes (in `step()`
    and where the next batch is asked for), and of a commit's parts, in µs. The rest is done in the backward pass and
    before the optimizer's step.
    """
    import numpy
    import torch

    from elasticd.checkpointing.at_fault.late_changes import BetweenSteps

    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    attached = {"model": model, "optimizer": optimizer}
    if more == "an object":
        attached["own"] = SimpleNamespace(state_dict=lambda: {"loss": 0.1, "count": 7}, load_state_dict=None)
    if more == "a scheduler":
        attached["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ELASTICD_HEARTBEAT"] = os.path.join(directory, "beat-0")
        donor = without_writer(attached, device)
        committed = donor._committed
        step_end = BetweenSteps(attached, donor, device, first_step=0)
        times, in_step, at_end = [], [], []
        for step in range(1, COMMITS + 1):
            if more == "dropout":
                torch.rand(1, device=device)
            if more == "numpy's draws":
                numpy.random.rand()
            start = time.perf_counter()
            donor._record_expected(None)
            donor._before_optimizer_step(optimizer)
            ready = time.perf_counter()
            donor.begin_commit()
            donor.commit(step)
            end = time.perf_counter()
            times.append(end - start)
            in_step.append(end - ready)
            step_end.commit(step, is_saved=False, ends_epoch=False)
            if step_end.on_step_begin(is_certain=True):
                raise AssertionError("nothing has changed")
            at_end.append(time.perf_counter() - end)
        parts = {
            "record": lambda: committed._record.commit(7),
            "objects": lambda: committed._copy_small_state(),
            "counters": lambda: committed._fingerprint.commit(),
            "ring": lambda: (committed._ring.before_optimizer_step(), committed._ring.commit(7, None)),
        }
        found = {name: statistics.median(timed(part) for _ in range(COMMITS)) for name, part in parts.items()}
    whole, part, last = (statistics.median(each) * 1e6 for each in (times, in_step, at_end))
    return whole, part, last, ", ".join(f"{name} {found[name] * 1e6:.1f}" for name in found)


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def without_writer(attached: dict[str, Any], device: Any) -> Any:
    """A donor that has no thread and saves nothing, and copies what every other donor copies."""
    from elasticd.checkpointing.at_fault.committed_state import CommittedState
    from elasticd.checkpointing.at_fault.donor import Donor

    group = SimpleNamespace(rank=0, world_size=1, device=device)
    saver: Any = SimpleNamespace(group=group, writer=None, round=1)
    donor: Any = Donor(saver, attached, True)
    donor._committed = CommittedState(saver, attached, {}, donor._record_expected)
    donor._committed.reason_against = str
    donor._why = ""
    return donor


if __name__ == "__main__":
    sys.exit(main())

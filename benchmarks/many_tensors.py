"""`python -m benchmarks.many_tensors`: what a save and a restore cost by the number of tensors, whole and sharded.

Models of many small parameters, 24 a layer, with AdamW's state: four tensors each. One process without a launcher, so a
save is measured with its write; CPU seconds, the best of three. The cost of a tensor should not grow with their
number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

LAYER = 24
REPETITIONS = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[2500, 5000, 10000, 20000])
    options = parser.parse_args(argv)
    import torch

    import elasticd

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(
        f"{'kind':<8} {'parameters':>10} {'first save':>11} {'save':>8} {'restore':>8}   µs a parameter: save, restore"
    )
    for kind in ("whole", "sharded"):
        for count in options.parameters:
            with tempfile.TemporaryDirectory() as directory, elasticd.init() as session:
                first, save, restore = measure(kind, count, session, directory)
            each = f"{save / count * 1e6:6.0f} {restore / count * 1e6:6.0f}"
            print(f"{kind:<8} {count:>10} {first:>9.2f} s {save:>6.2f} s {restore:>6.2f} s   {each}", flush=True)
    return 0


def measure(kind: str, count: int, session: Any, directory: str) -> tuple[float, float, float]:
    """Seconds of the first save, of a later one, and of a restore in a new session."""
    import elasticd

    model, optimizer = build(kind, count)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    session.attach(model=model, optimizer=optimizer)
    session.checkpoint(every=10**9, directory=directory)
    first, *later = [timed(session.save) for _ in range(1 + REPETITIONS)]
    restores = []
    for _ in range(REPETITIONS):
        model, optimizer = build(kind, count)
        again = elasticd.init()
        again.attach(model=model, optimizer=optimizer)
        restores.append(timed(lambda: again.restore(directory)))  # noqa: B023 - called at once
        again.close()
    return first, min(later), min(restores)


def build(kind: str, count: int) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = [
        nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(min(LAYER, count - start))])
        for start in range(0, count, LAYER)
    ]
    blocks = [nn.Sequential(*layers[start : start + LAYER]) for start in range(0, len(layers), LAYER)]
    model = nn.Sequential(*blocks)
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def timed(call: Any) -> float:
    """CPU seconds: a busy machine does not change them much."""
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())

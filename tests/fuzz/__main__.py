"""`make fuzz`: every target for a while, or those named: python -m tests.fuzz [--seconds N] [NAME ...]."""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
from pathlib import Path

from tests.fuzz.guided import Defect, fuzz
from tests.fuzz.targets import corpus, targets

CORPUS = Path(".fuzz")
"""What was found in earlier runs, by target; not a part of the repository."""
MAX_MEMORY = 150 << 20
"""Of this process, which is an agent with its API and pages: whatever it reads, it stays small."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each target; default: 120")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    failed = 0
    with targets() as known:
        for name in options.names or known:
            folder = CORPUS / name
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fresh, tried, lines = fuzz(
                    known[name], corpus(CORPUS, name), random.Random(seed), seconds=options.seconds
                )
            except Defect as error:
                failed += 1
                (CORPUS / f"{name}.defect").write_bytes(error.data)
                print(f"{name}: {error}; the input is in {CORPUS / name}.defect", flush=True)
                continue
            for data in fresh:
                (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            is_large = peak > MAX_MEMORY
            failed += is_large
            so_far = f"{peak >> 20} MiB of memory so far" + (", which is too much" if is_large else "")
            print(f"{name}: {tried} inputs, {len(fresh)} kept, {lines} lines reached, {so_far}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

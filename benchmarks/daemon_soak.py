"""Agents under random faults, with jobs that come and go: the last part but one of `make soak`.

    python -m benchmarks.daemon_soak [--faults 300] [--nodes 4] [--seed N] [--keep DIRECTORY]

Exit code 1 if a promise was broken or something is stuck. A seed gives the same faults again; when and whom they strike
depends on the machine. As root, one node's disk is filled, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import daemon_checker
from benchmarks.daemon_faults import Say, Soak, Stuck
from benchmarks.daemon_fleet import STEPS, Fleet
from tests.etcd import etcd_servers


def soak(
    work: Path,
    faults: int | Sequence[str],
    nodes: int,
    seed: int,
    limit_s: float,
    say: Say,
    steps: tuple[int, int] = STEPS,
    lasts_s: tuple[float, float] = (1.0, 8.0),
) -> list[str]:
    """Run it; returns every breach. Stops striking after `limit_s`, whatever is left.

    `faults`: how many, or which. `steps`: of a job, least and most; `lasts_s`: what is away or stopped, so likewise.
    """
    stuck: list[str] = []
    with etcd_servers() as etcd:
        fleet = Fleet(work, etcd, nodes, seed, steps)
        run = Soak(fleet, random.Random(seed), say, lasts_s)
        try:
            fleet.start()
            if isinstance(faults, int):
                say(f"seed {seed}: {faults} faults of agents on {nodes} nodes")
                run.run(faults, limit_s)
            else:
                for name in faults:
                    run.strike(name)
                run.calm()
            fleet.leave()
        except (Stuck, AssertionError) as error:
            stuck = [f"stuck after fault {run.count}: {str(error)[:6000]}"]
        finally:
            fleet.close()
    say(", ".join(f"{count} × {what}" for what, count in sorted(run.struck.items())))
    return stuck + daemon_checker.breaches(daemon_checker.read(work))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="(default %(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="an empty directory for everything that is written; kept")
    args = parser.parse_args(argv)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="elasticd-soak-") as scratch:
        work = args.keep or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        found = soak(work, args.faults, args.nodes, args.seed, args.limit, say)
    print("\n".join(f"BREACH {each}" for each in found) or "every promise was kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

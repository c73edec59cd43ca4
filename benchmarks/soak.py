"""`make soak`: 200 kills in a row in one job, and in another one whose ranks save at the fault; every way to hang, a
quarter of an hour of slow jobs, 200 random faults in one job on several nodes, and 300 of agents with a stream of jobs,
some of which are hostile.

Exit code 1 if a kill was not recovered, a hang not found, a slow job killed, or a guarantee broken. A seed gives the
same faults again; when they happen depends on the machine. The job on several nodes needs root, because its hosts are
network namespaces.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import daemon_soak, donors, hangs, recovery
from benchmarks.node_faults import describe, soak
from tests.multihost.net import missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in each of two jobs on one node (default %(default)s)")
    parser.add_argument("--hangs", type=int, default=1, help="of every way to hang (default %(default)s)")
    parser.add_argument("--slow-minutes", type=float, default=15.0, help="of slow jobs (default %(default)g)")
    parser.add_argument("--faults", type=int, default=200, help="in one job on several nodes (default %(default)s)")
    parser.add_argument("--agents", type=int, default=300, help="faults of agents (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="of the second job (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the second job (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="an empty directory for the second job's files; kept")
    args = parser.parse_args(argv)
    code = recovery.main(["--kills", str(args.kills), "--seed", str(args.seed)]) if args.kills else 0
    if args.kills:
        code = donors.main(["--kills", str(args.kills), "--seed", str(args.seed)]) or code
    if args.hangs or args.slow_minutes:
        arguments = [
            "--repetitions",
            str(args.hangs),
            "--slow-minutes",
            str(args.slow_minutes),
            "--seed",
            str(args.seed),
        ]
        code = hangs.main(arguments) or code
    if args.agents:
        code = daemon_soak.main(["--faults", str(args.agents), "--seed", str(args.seed)]) or code
    if not args.faults:
        return code
    if reason := missing():
        print(f"no faults of nodes: {reason}", file=sys.stderr)
        return 1
    found = soak(args.faults, args.nodes, args.seed, args.limit, args.keep, say)
    print(describe(found))
    return 1 if found else code


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

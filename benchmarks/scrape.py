"""How long a scrape of a node's metrics takes while its jobs run, and how many series it brings.

    python benchmarks/scrape.py [--jobs 3] [--workers 2] [--scrapes 200] [--out bench-results/scrape.json]

One agent with a local store runs `--jobs` jobs of `--workers` DDP workers each, which make a step every 200 ms. Its
/metrics is read `--scrapes` times over HTTP, ten times a second, each time on a connection of its own, as
Prometheus does at worst. Reported: milliseconds from connecting to the last byte, of these scrapes and, for comparison,
of as many of /healthz, which reads no runner; series and bytes of the page; and what a scrape costs in processor time,
the agent's and all runners' together. Ends with 1 where half of the scrapes take more than 20 ms.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.daemon import InstalledAgent, StepLog, cpu_s, folder, wait_for

MAX_MS = 20.0
PAUSE_S = 0.1


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def timed(url: str, times: int) -> tuple[list[float], bytes]:
    """Milliseconds of each, sorted, and the last page."""
    took, page = [], b""
    for _ in range(times):
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=10) as answer:
            page = answer.read()
        took.append(1000 * (time.perf_counter() - began))
        time.sleep(PAUSE_S)
    return sorted(took), page


def summary(took: Sequence[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(took), 2),
        "p95_ms": round(took[int(0.95 * (len(took) - 1))], 2),
        "most_ms": round(took[-1], 2),
    }


def measure(jobs: int, workers: int, scrapes: int) -> dict[str, object]:
    with folder() as place:
        agent, port = InstalledAgent(place), free_port()
        text = agent.config.read_text().replace("port = 0", f"port = {port}").replace("slots = 8", "slots = 64")
        agent.config.write_text(text)
        try:
            agent.start()
            notes = [StepLog(place / f"job{number}", workers) for number in range(jobs)]
            for number, one in enumerate(notes):
                one.folder.mkdir()
                agent.submit(f"bench{number}", one.folder, workers)
            wait_for(lambda: all(len(one.steps(workers - 1)) > 5 for one in notes), "steps of every job")
            locks = sorted((agent.state / "runners").glob("bench*/lock"))
            pids = [agent.pid, *(int(lock.read_text().split()[0]) for lock in locks)]
            timed(f"http://127.0.0.1:{port}/metrics", 5)
            before = sum(map(cpu_s, pids))
            nothing, _ = timed(f"http://127.0.0.1:{port}/healthz", scrapes)
            between = sum(map(cpu_s, pids))
            took, page = timed(f"http://127.0.0.1:{port}/metrics", scrapes)
            after = sum(map(cpu_s, pids))
        finally:
            agent.drain()
    lines = [line for line in page.splitlines() if not line.startswith(b"#")]
    return {
        "jobs": jobs,
        "workers": jobs * workers,
        "jobs on the page": len({line.split(b'job_id="')[1].split(b'"')[0] for line in lines if b'job_id="' in line}),
        "metrics": summary(took),
        "healthz": summary(nothing),
        "series": len(lines),
        "bytes": len(page),
        "cpu_ms_each": round(1000 * ((after - between) - (between - before)) / scrapes, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("bench-results/scrape.json"))
    args = parser.parse_args()
    found = measure(args.jobs, args.workers, args.scrapes)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    return 0 if metrics["median_ms"] <= MAX_MS and found["jobs on the page"] == args.jobs else 1


if __name__ == "__main__":
    sys.exit(main())

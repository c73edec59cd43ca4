"""Merges the node's metrics and those of its runners into one page for a scrape.

Runners are queried in parallel, so a scrape takes as long as the slowest runner. A runner belongs to its job's user and
must not corrupt the page: one that does not answer in time is left out, and its reply is reduced to a bounded number of
well-formed samples of its own job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from elasticd_agent.system.control_socket import ControlSocketError
from elasticd_agent.telemetry.metric_table import escape_label

Query = Callable[[str, int, float], bytes]
"""Job, number, timeout in seconds; raises ControlSocketError."""

SCRAPE_S = 5.0
"""For all runners together; Prometheus gives up after 10 s."""
PER_RUNNER_S = 1.5
MAX_PARALLEL = 8
MAX_SERIES = 500
"""Of one job. A runner of this version has fewer; one of the next version may have more."""

_TEXT = r'(?:[^"\\\x00-\x1f]|\\[\\n"])*'
_HEAD = re.compile(r"# (?:HELP elasticd_[a-z0-9_]+ [^\x00-\x1f]*|TYPE elasticd_[a-z0-9_]+ (?:counter|gauge|histogram))")
_SAMPLE = re.compile(rf'elasticd_[a-z0-9_]+{{((?:[a-z_]+="{_TEXT}",?)*)}} (?:-?[0-9.]+(?:e[-+]?[0-9]+)?|NaN|[-+]Inf)')
_LABEL = re.compile(rf'([a-z_]+)="({_TEXT})"')


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """Several pages as one: each family once, as the format requires, with the samples of all pages."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        family = b""
        first: set[bytes] = set()
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                if family not in heads or family in first:
                    first.add(family)
                    heads.setdefault(family, []).append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(line)
    named = [name for name in heads if name in samples]
    return b"".join(b"\n".join([*heads[name], *samples[name]]) + b"\n" for name in named)


def scrape_runners(node: str, jobs: Sequence[tuple[str, int]], query: Query) -> list[bytes]:
    """The pages of these jobs' runners on `node` that answer in time."""
    until = time.monotonic() + SCRAPE_S

    def page(key: tuple[str, int]) -> bytes:
        left = until - time.monotonic()
        try:
            return filter_samples(node, key[0], query(*key, min(PER_RUNNER_S, left))) if left > 0 else b""
        except ControlSocketError:
            return b""

    if len(jobs) < 2:
        found = [page(key) for key in jobs]
    else:
        with ThreadPoolExecutor(min(len(jobs), MAX_PARALLEL), "elasticd-scrape") as pool:
            found = list(pool.map(page, jobs))
    return [one for one in found if one]


def filter_samples(node: str, job: str, page: bytes) -> bytes:
    """The valid samples of a runner's page: in Prometheus' text format, and of this job on this node."""
    expected = {"job_id": escape_label(job), "node": escape_label(node)}
    kept = []
    family = ""
    left = MAX_SERIES
    for line in page.decode(errors="replace").split("\n"):
        if line.startswith("# "):
            if _HEAD.fullmatch(line):
                family = line.split(" ", 3)[2]
                kept.append(line)
            continue
        sample = _SAMPLE.fullmatch(line)
        if not left or sample is None or not family or not line.startswith(family):
            continue
        pairs = _LABEL.findall(sample[1])
        labels = dict(pairs)
        if len(labels) < len(pairs):
            continue
        if labels.get("job_id") == expected["job_id"] and labels.get("node", expected["node"]) == expected["node"]:
            kept.append(line)
            left -= 1
    return "\n".join(kept).encode() + b"\n"

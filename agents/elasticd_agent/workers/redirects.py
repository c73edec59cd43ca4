"""Pure: where a worker's output goes, by torchrun's --redirects, --tee and --local-ranks-filter, and our --log-dir.

The rules are those of `DefaultLogsSpecs.reify` in torch/distributed/elastic/multiprocessing/api.py, and one more:
--log-dir without --redirects and --tee, which keeps only error files there, keeps a copy of all output here and also
shows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from string import Template

from elasticd_agent.model.job import JobSpec, Streams

STREAM_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """`path` None: the inherited descriptor. `tailed`: the file is shown on the console, each line after `prefix`."""

    path: Path | None = None
    tailed: bool = False
    prefix: bytes = b""


INHERITED = OutputTarget()
DISCARDED = OutputTarget(Path(os.devnull))


def keeps_files(spec: JobSpec) -> bool:
    """Whether any worker's output goes to files; without a log_dir these are in a temporary directory."""
    if spec.log_dir == Path(os.devnull):
        return False
    return spec.log_dir is not None or _redirects_or_tees(spec)


def plan_stream(spec: JobSpec, which: Streams, rank_dir: Path, local_rank: int, prefix: bytes) -> OutputTarget:
    """The target of stream `which` (OUT or ERR) of `local_rank`; `rank_dir` is the directory for its files."""
    shown_rank = spec.local_ranks_filter is None or local_rank in spec.local_ranks_filter
    if not keeps_files(spec):
        return INHERITED if shown_rank else DISCARDED
    path = rank_dir / f"{STREAM_NAMES[which]}.log"
    if not _redirects_or_tees(spec):
        return OutputTarget(path, tailed=shown_rank)
    if spec.tee.get(local_rank, Streams.NONE) & which:
        return OutputTarget(path, tailed=shown_rank, prefix=prefix if shown_rank else b"")
    if spec.redirects.get(local_rank, Streams.NONE) & which:
        return OutputTarget(path)
    return INHERITED if shown_rank else DISCARDED


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> bytes:
    """The prefix of --tee; `template` is TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, a string.Template."""
    text = f"[{role}{local_rank}]:"
    if template:
        text = Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
    return text.encode("utf-8", "surrogateescape")


def _redirects_or_tees(spec: JobSpec) -> bool:
    return any(spec.redirects.values()) or any(spec.tee.values())

"""Worker logs of one job on one node: where each worker's output goes, and which files the console shows.

Workers write to files or to inherited descriptors. A log directory that fails costs the logs, never a start: the output
then goes to the console.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.model.job import JobSpec, Streams
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.workers.log_dir import KEEP_ROUNDS, LogDirectory
from elasticd_agent.workers.log_tail import LIMIT, LineFilter, LogTailer, TailedFile
from elasticd_agent.workers.redirects import STREAM_NAMES, OutputTarget, keeps_files, line_prefix, plan_stream

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    stdout: str | None
    stderr: str | None
    error: str


class JobLogs:
    """Belongs to the deciding thread; slow operations run on the tailer's."""

    def __init__(
        self,
        spec: JobSpec,
        runtime: Path,
        out: NonBlockingWriter,
        err: NonBlockingWriter,
        log: Callable[[str], None],
        template: str | None = None,
        limit: int = LIMIT,
        keep_rounds: int = KEEP_ROUNDS,
    ) -> None:
        """`template` is TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; `runtime` takes error files if there are no log files.
        Raises UsageError if the log directory cannot be used."""
        self._spec, self._runtime, self._log, self._template = spec, runtime, log, template
        self._outlets = {Streams.OUT: out, Streams.ERR: err}
        self._limit, self._keep_rounds = limit, keep_rounds
        self._directory: LogDirectory | None = None
        self._tail: LogTailer | None = None
        if keeps_files(spec):
            base = spec.log_dir
            if base is None:
                base = Path(tempfile.mkdtemp(prefix="elasticd_logs_"))
                log(f"worker logs go to {base}, which is never deleted; --log-dir chooses another directory")
            self._directory = LogDirectory(base, spec.job_id, spec.run)
            self._tail = LogTailer({out, err})
        self._newest = 0

    def highest_round(self) -> int:
        """The highest round with logs here; a new job's rounds start above it."""
        return 0 if self._directory is None else self._directory.highest_round()

    def worker(self, number: int, local_rank: int, rank: int) -> WorkerFiles:
        """Create the files of a worker of round `number`, and follow them."""
        if self._directory is None or self._tail is None:
            return self._without_files(number, local_rank, rank)
        directory, tail = self._directory, self._tail
        rank_dir = directory.rank_dir(number, rank)
        try:
            rank_dir.parent.mkdir(mode=0o700, exist_ok=True)
            rank_dir.mkdir(mode=0o700, exist_ok=True)
            out, err = (self._open(which, number, local_rank, rank, rank_dir, tail) for which in STREAM_NAMES)
        except OSError as error:
            self._log(f"rank {rank}'s output goes to the console: its logs cannot be written: {error}")
            return self._without_files(number, local_rank, rank)
        if number > self._newest:
            self._newest = number
            tail.run_later(lambda: directory.prune(self._keep_rounds, number))
        return WorkerFiles(out, err, str(rank_dir / "error.json"))

    def evidence_dir(self, number: int) -> Path:
        """The directory for evidence of a hang in round `number`, created by its writer."""
        if self._directory is None:
            own = Path(tempfile.gettempdir()) / f"elasticd-evidence-{os.getuid()}" / self._spec.job_id
            return own / f"round-{number}" / "evidence"
        return self._directory.rank_dir(number, 0).with_name("evidence")

    def group_ended(self, number: int) -> None:
        if self._tail is not None:
            self._tail.finish(number)

    def close(self, within: float = 2.0) -> None:
        """Show the rest, for at most `within` seconds. Safe to call again."""
        if self._tail is not None:
            self._tail.close(within)
        if self._directory is not None:
            self._directory.close()

    def _without_files(self, number: int, local_rank: int, rank: int) -> WorkerFiles:
        shown = self._spec.local_ranks_filter is None or local_rank in self._spec.local_ranks_filter
        path = None if shown else os.devnull
        error_dir = self._runtime / f"round-{number}"
        error_dir.mkdir(mode=0o700, exist_ok=True)
        return WorkerFiles(path, path, str(error_dir / f"error-{rank}.json"))

    def _open(
        self, which: Streams, number: int, local_rank: int, rank: int, rank_dir: Path, tail: LogTailer
    ) -> str | None:
        prefix = line_prefix(self._template, self._spec.role, rank, local_rank)
        stream = plan_stream(self._spec, which, rank_dir, local_rank, prefix)
        if stream.path is not None and stream.path.parent == rank_dir:
            tail.follow(self._followed(which, number, rank, stream, stream.path))
        return None if stream.path is None else str(stream.path)

    def _followed(self, which: Streams, number: int, rank: int, stream: OutputTarget, path: Path) -> TailedFile:
        spec = self._spec
        needles = spec.duplicate_stdout_filters if which is Streams.OUT else spec.duplicate_stderr_filters
        filter = None
        if needles and stream.prefix:
            matching = path.parent.parent / f"filtered_{STREAM_NAMES[which]}.log"
            filter = LineFilter(matching, tuple(needle.encode("utf-8", "surrogateescape") for needle in needles))
        outlet = self._outlets[which] if stream.tailed else None
        name = f"rank {rank}'s {STREAM_NAMES[which]}"
        return TailedFile(path, number, name, outlet, stream.prefix, filter, self._limit)

"""Worker logs of one job on one node: where each worker's output goes, and which files the console shows.

Workers write to files or to inherited descriptors. A log directory that fails costs the logs, never a start: the output
then goes to the console. The log directory holds `round-<N>/rank-<R>/{stdout.log,stderr.log,error.json}` of one job at
a time. Round numbers only grow, within a job and, by `highest_round`, from one job to the next, so nothing is
overwritten.

Redirection follows `DefaultLogsSpecs.reify` in torch/distributed/elastic/multiprocessing/api.py, with one more rule:
--log-dir without --redirects and --tee, which keeps only error files there, keeps and shows all output here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

from elasticd.errors import UsageError
from elasticd_agent.model.job import JobSpec, Streams
from elasticd_agent.model.records import is_later_run
from elasticd_agent.system.files import remove_tree, temporary_directory
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.workers.log_tail import MAX_LOG_BYTES, LogTailer, MatchingLinesFile, TailedFile

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
    """True if any worker's output goes to files; without a log_dir these are in a temporary directory."""
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


def shows_all_ranks_apart(spec: JobSpec, which: Streams) -> bool:
    """True if the console shows this stream of every worker, and no worker's lines among another's."""
    targets = [plan_stream(spec, which, Path(), local_rank, b"x") for local_rank in range(spec.max_workers)]
    shown = all(target == INHERITED or target.tailed for target in targets)
    return shown and (spec.max_workers == 1 or all(target.prefix for target in targets))


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> bytes:
    """The prefix of --tee; `template` is TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, a string.Template."""
    text = f"[{role}{local_rank}]:"
    if template:
        text = Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
    return text.encode("utf-8", "surrogateescape")


def _redirects_or_tees(spec: JobSpec) -> bool:
    return any(spec.redirects.values()) or any(spec.tee.values())


# With two files of at most 128 MiB a rank this bounds the disk usage of a job that restarts for ever.
KEEP_ROUNDS = 100
LOCK_FILE = ".elasticd.lock"
_ROUND_NAME = re.compile(r"round-([1-9][0-9]*)")

_log = logging.getLogger("elasticd.logs")


class LogDirectory:
    """Locked by one job from construction to `close`. Several agents of the same job and run may share it."""

    def __init__(self, path: Path, job: str, run: str) -> None:
        """Creates `path` (0700). Raises UsageError if that fails, or another job writes there."""
        self.path = path
        self._holder = f"job {job} run {run}"
        self._fd = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--log-dir {path}: logs cannot be written there: {why}") from error
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def _lock(self, tries: int = 5) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 4096, 0).decode("utf-8", "replace").strip()
            if holder.rpartition(" pid ")[0] == self._holder:
                return
            if tries:  # `earlier_run_that_logs` has it for a moment
                time.sleep(0.02)
                return self._lock(tries - 1)
            raise UsageError(
                f"--log-dir {self.path}: {holder or 'another job'} is writing its logs there; give each job its own"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _log.warning("--log-dir %s: this file system has no locks; two jobs could mix their logs there", self.path)
            return
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{self._holder} pid {os.getpid()}\n".encode("utf-8", "replace"), 0)

    def rank_dir(self, number: int, rank: int) -> Path:
        return self.path / f"round-{number}" / f"rank-{rank}"

    def prune(self, keep: int, current: int) -> list[Path]:
        """Delete the oldest rounds beyond the newest `keep`, never `current` or newer. Returns the deleted paths."""
        old = [number for number in _rounds_with_logs(self.path)[: -keep or None] if number < current]
        deleted = [self.path / f"round-{number}" for number in old]
        for path in deleted:
            remove_tree(path)
        return deleted

    def close(self) -> None:
        """Safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def earlier_run_that_logs(path: Path, job: str, run: str) -> str:
    """Which earlier run of the job has the directory locked, in words, or ""."""
    with suppress(OSError), open(path / LOCK_FILE, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = re.fullmatch(r"job (.*) run (.*) pid \d+", file.read(4096).decode("utf-8", "replace").strip())
            if holder is not None and holder[1] == job and is_later_run(run, holder[2]):
                return f"--log-dir {path}: {holder[0]}, an earlier run, still writes its logs there"
    return ""


def highest_round(path: Path) -> int:
    """The highest round with logs in `path`; 0 if there is none."""
    return max(_rounds_with_logs(path), default=0)


def _rounds_with_logs(path: Path) -> list[int]:
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(_ROUND_NAME.fullmatch, names) if match)


PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    stdout: str | None
    stderr: str | None
    error_file: str


class JobLogs:
    """The output files of a job's workers on this node, of all its rounds, and what the console shows of them.

    It belongs to the deciding thread; slow operations run on the tailer's.
    """

    def __init__(
        self,
        spec: JobSpec,
        runtime: Path,
        out: NonBlockingWriter,
        err: NonBlockingWriter,
        log: Callable[[str], None],
        template: str | None = None,
        limit: int = MAX_LOG_BYTES,
        keep_rounds: int = KEEP_ROUNDS,
    ) -> None:
        """`template` is TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; `runtime` takes error files if there are no log files.
        Raises UsageError if the log directory cannot be used."""
        self._spec = spec
        self._runtime = runtime
        self._log = log
        self._template = template
        self._outlets = {Streams.OUT: out, Streams.ERR: err}
        self._limit = limit
        self._keep_rounds = keep_rounds
        self._directory: LogDirectory | None = None
        self._tail: LogTailer | None = None
        if keeps_files(spec):
            base = spec.log_dir
            if base is None:
                try:
                    base = Path(tempfile.mkdtemp(prefix="elasticd_logs_"))
                except OSError as error:
                    raise UsageError(f"worker logs have no place: {error.strerror}; choose one by --log-dir") from error
                log(f"worker logs go to {base}, which is never deleted; --log-dir chooses another directory")
            self._directory = LogDirectory(base, spec.job_id, spec.run)
            self._tail = LogTailer({out, err})
        self._newest = 0

    def highest_round(self) -> int:
        """The highest round with logs here; a new job's rounds start above it."""
        return 0 if self._directory is None else highest_round(self._directory.path)

    def open_worker_files(self, number: int, local_rank: int, rank: int) -> WorkerFiles:
        """Create the files of a worker of round `number`, and follow them."""
        if self._directory is None or self._tail is None:
            return self._files_without_logs(number, local_rank, rank)
        directory, tail = self._directory, self._tail
        rank_dir = directory.rank_dir(number, rank)
        try:
            rank_dir.parent.mkdir(mode=0o700, exist_ok=True)
            rank_dir.mkdir(mode=0o700, exist_ok=True)
            out, err = (self._open_stream(which, number, local_rank, rank, rank_dir, tail) for which in STREAM_NAMES)
        except OSError as error:
            self._log(f"rank {rank}'s output goes to the console: its logs cannot be written: {error}")
            return self._files_without_logs(number, local_rank, rank)
        if number > self._newest:
            self._newest = number
            tail.run_later(lambda: directory.prune(self._keep_rounds, number))
        return WorkerFiles(out, err, str(rank_dir / "error.json"))

    def evidence_dir(self, number: int) -> Path:
        """The directory for evidence of a hang in round `number`, created by its writer."""
        if self._directory is None:
            own = temporary_directory() / f"elasticd-evidence-{os.getuid()}" / self._spec.job_id
            return own / f"round-{number}" / "evidence"
        return self._directory.rank_dir(number, 0).with_name("evidence")

    def group_ended(self, number: int) -> None:
        """Have the round's files read to their end, and closed then."""
        if self._tail is not None:
            self._tail.finish_round(number)

    def close(self, within: float = 2.0) -> None:
        """Show the rest, for at most `within` seconds. Safe to call again."""
        if self._tail is not None:
            self._tail.close(within)
        if self._directory is not None:
            self._directory.close()

    def _files_without_logs(self, number: int, local_rank: int, rank: int) -> WorkerFiles:
        """Return a worker's output without log files: inherited, or discarded where nobody reads it or the rank is not
        shown.
        """
        shown = self._spec.local_ranks_filter is None or local_rank in self._spec.local_ranks_filter
        out, err = (
            None if shown and not self._outlets[which].is_reader_gone() else os.devnull for which in STREAM_NAMES
        )
        error_dir = self._runtime / f"round-{number}"
        error_dir.mkdir(mode=0o700, exist_ok=True)
        return WorkerFiles(out, err, str(error_dir / f"error-{rank}.json"))

    def _open_stream(
        self, which: Streams, number: int, local_rank: int, rank: int, rank_dir: Path, tail: LogTailer
    ) -> str | None:
        prefix = line_prefix(self._template, self._spec.role, rank, local_rank)
        stream = plan_stream(self._spec, which, rank_dir, local_rank, prefix)
        # Another process of a slot that starts ahead of its round continues the file of the one before.
        if stream.path is not None and stream.path.parent == rank_dir and not tail.follows(stream.path):
            tail.follow(self._tailed_file(which, number, rank, stream, stream.path))
        if stream.path is None:
            return os.devnull if self._outlets[which].is_reader_gone() else None
        return str(stream.path)

    def _tailed_file(self, which: Streams, number: int, rank: int, stream: OutputTarget, path: Path) -> TailedFile:
        """Return the followed file of one stream, with its prefix and its filter."""
        spec = self._spec
        needles = spec.duplicate_stdout_filters if which is Streams.OUT else spec.duplicate_stderr_filters
        filter = None
        if needles and stream.prefix:
            matching = path.parent.parent / f"filtered_{STREAM_NAMES[which]}.log"
            filter = MatchingLinesFile(matching, tuple(needle.encode("utf-8", "surrogateescape") for needle in needles))
        outlet = self._outlets[which] if stream.tailed else None
        name = f"rank {rank}'s {STREAM_NAMES[which]}"
        return TailedFile(path, number, name, outlet, stream.prefix, filter, self._limit)

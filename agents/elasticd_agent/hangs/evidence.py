"""Evidence of a hang, taken before the group is killed: by helper processes, on local disk first, in bounded time.

It exists so that whoever decides never waits for what may hang: a process stuck in the kernel, a dead file system, a
driver. Everything slow happens in helpers (gather/), which a thread of this one starts, listens to, and kills with
their whole session at their deadline. What a helper has told by then counts. It judges nothing.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd_agent.hangs.collector.request import CollectRequest, PublishRequest, WorkerRequest
from elasticd_agent.hangs.tools import find_py_spy
from elasticd_agent.model.reports import Where
from elasticd_agent.system import procfs
from elasticd_agent.system.helper_process import HelperError, HelperProcess, HelperTimeout
from elasticd_agent.system.installation import import_path, program
from elasticd_agent.system.nvml import find_nvml

GATHER_PART, KILL_PART = 0.6, 0.7
"""Of the budget: how long a helper gathers, and when it is killed. The rest is for the way to the log directory."""
PUBLISH_S = 1.0
"""That way has at least so much: a directory is not dead because a busy machine took the whole budget to gather."""
FALLBACK_S = 2.0
"""For the copy outside of the log directory, if that does not answer: by then nobody waits for it."""
WRITE_S = 5.0
"""For what was decided: nobody waits for it, and on a busy machine a helper needs seconds to start."""
CLOSE_S = 3.0
ORPHAN_S = 5.0
"""A helper whose agent has been killed ends so long after it should have."""
REAP_S = 0.5

_log = logging.getLogger("elasticd.evidence")


@dataclass(frozen=True, slots=True)
class EvidenceTarget:
    """One worker, and where its files are.

    `logs` are what it prints to; `stacks` is what its faulthandler appends to, `flight` what its background thread
    writes the flight recorder to. `pipe`: NCCL's dump pipe, and `dump` the file that NCCL then writes.
    """

    rank: int
    pid: int
    logs: tuple[Path, ...] = ()
    heartbeat: Path | None = None
    stacks: Path | None = None
    flight: Path | None = None
    pipe: Path | None = None
    dump: Path | None = None


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What was found of one rank.

    `where` its main thread is and the `function` that says so; `stack` is the same for equal stacks; `state` and
    `wchan` are /proc's. `source` is who gave the stack, "" if nobody did; `trouble` then says why.
    """

    rank: int
    where: Where
    function: str
    stack: str
    state: str
    wchan: str
    source: str
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """Evidence of round `number` is at `path`, after `seconds`. `trouble`: what is missing or elsewhere, and why."""

    round: int
    ranks: tuple[RankEvidence, ...]
    path: Path
    seconds: float
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Gather:
    round: int
    targets: tuple[EvidenceTarget, ...]
    final: Path
    why: str
    began: float


@dataclass(frozen=True, slots=True)
class _Write:
    round: int
    name: str
    text: str
    final: Path


class EvidenceCollector:
    """Takes it, one gathering at a time, in a thread that ends with `close`."""

    def __init__(
        self,
        scratch: Path,
        post: Callable[[GatheredEvidence], None],
        budget_s: float,
        keep: int = 8,
        job: str = "",
        spy: str | None = None,
        temporary: Path | None = None,
        nvml: str | None = None,
    ) -> None:
        """`scratch` is on local disk and may go when the agent does; `post` is called by the thread.

        `job` names the place in `temporary` (the system's directory for that) for evidence whose own place does not
        answer. `spy` is py-spy, "" for none; None: it is looked for. `nvml` is the directory that has pynvml; None: if
        this machine has GPUs, it is looked for.
        """
        self._scratch, self._post, self._budget_s, self._kept_rounds = scratch, post, budget_s, keep
        self._spy, self._nvml = spy, nvml
        temporary = temporary or Path(tempfile.gettempdir())
        self._fallback_dir = temporary / f"elasticd-evidence-{os.getuid()}" / (job or scratch.name)
        self._requests: queue.SimpleQueue[_Gather | _Write | None] = queue.SimpleQueue()
        self._next: deque[_Gather | _Write | None] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._helper: HelperProcess | None = None
        self._busy = self._taking = self._publishing = self._dropped = self._closing = self._warned = False
        self._redirected: dict[Path, Path] = {}

    def gather(self, number: int, targets: Sequence[EvidenceTarget], final: Path, why: str) -> bool:
        """Begin; a Gathered is posted within the budget, or KEEP_S after it where gathering took all of it.

        False: nothing begins; another one is still going on, or there can be no thread.
        """
        with self._lock:
            if self._busy or self._closing:
                return False
            self._busy = True
        if not self._enqueue(_Gather(number, tuple(targets), final, why, time.monotonic())):
            self._busy = False
            return False
        return True

    def write(self, number: int, name: str, text: str, final: Path) -> None:
        """Put a small file beside the evidence of round `number`, soon."""
        if not self._closing:
            self._enqueue(_Write(number, name, text, final))

    def directory_for(self, final: Path) -> Path:
        """Where what belongs into `final` is put: elsewhere, since `final` was found not to answer."""
        return self._redirected.get(final, final)

    def discard(self) -> None:
        """The processes are about to be ended: what is being taken of them is dropped, what was taken before stays."""
        with self._lock:
            if self._busy and not self._publishing:
                self._dropped = True
                if self._helper is not None:
                    self._helper.kill()

    def close(self) -> None:
        """Finish what is to be written, end everything else. Bounded; safe to call again."""
        with self._lock:
            self._closing = True
            if self._taking and self._helper is not None:
                self._helper.kill()
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(CLOSE_S)
            with self._lock:
                if self._helper is not None:
                    self._helper.kill()
            self._thread.join(2 * REAP_S)

    def _enqueue(self, what: _Gather | _Write) -> bool:
        self._requests.put(what)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elasticd-evidence", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no room for another one: the job goes on, and it is tried again
                if not self._warned:  # a suspicious loop asks at every look
                    _log.warning("evidence of round %d: %s", what.round, error)
                self._warned = True
                self._requests.get_nowait()
                return False
            self._thread = thread
        return True

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (what := self._next.popleft() if self._next else self._requests.get()) is not None:
            if isinstance(what, _Write):
                self._write(self._same_place(what))
            elif not self._closing:
                self._take(what)

    def _same_place(self, first: _Write) -> list[_Write]:
        """It and what else is to be written there now."""
        batch = [first]
        with suppress(queue.Empty):
            while True:
                what = self._requests.get_nowait()
                if not isinstance(what, _Write) or what.final != first.final:
                    self._next.append(what)
                    break
                batch.append(what)
        return batch

    def _write(self, batch: list[_Write]) -> None:
        first = batch[0]
        files = tuple((one.name, one.text) for one in batch)
        place = self.directory_for(first.final)
        trouble = self._publish(PublishRequest(str(place), files=files), time.monotonic() + WRITE_S)
        if trouble:
            kept = self._redirect(first.round, first.final)
            _log.warning("%s cannot be written: %s; %s is in %s", place, trouble, ", ".join(n for n, _ in files), kept)
            self._publish(
                PublishRequest(str(kept), files=files, rounds=self._kept_rounds), time.monotonic() + FALLBACK_S
            )

    def _take(self, asked: _Gather) -> None:
        local = self._scratch / "evidence" / f"{asked.round}-{asked.final.name}"
        heard: dict[int, dict[str, Any]] = {}
        self._taking, kept = True, asked.final
        try:
            kept, troubles = self._gather(asked, local, heard)
        except Exception as error:  # noqa: BLE001 whoever waits for evidence must hear that there is none
            troubles = [f"no evidence: {type(error).__name__}: {error}"]
        if troubles:
            _log.warning("evidence of round %d: %s", asked.round, "; ".join(troubles))
        ranks = tuple(_of(target, heard.get(target.rank, {})) for target in asked.targets)
        with self._lock:
            self._busy = self._taking = self._publishing = self._dropped = False
        self._post(GatheredEvidence(asked.round, ranks, kept, time.monotonic() - asked.began, "; ".join(troubles)))
        if kept != asked.final and local.exists():
            lost = self._publish(
                PublishRequest(str(kept), str(local), rounds=self._kept_rounds), time.monotonic() + FALLBACK_S
            )
            if lost:
                _log.warning("%s cannot be written either: %s", kept, lost)
        shutil.rmtree(local, ignore_errors=True)

    def _gather(self, asked: _Gather, local: Path, heard: dict[int, dict[str, Any]]) -> tuple[Path, list[str]]:
        """All that has a deadline. Returns where the evidence is, or will be, and what went wrong."""
        troubles: list[str] = []

        def hear(line: dict[str, Any]) -> None:
            if "rank" in line:
                heard.setdefault(line["rank"], {}).update(line)
            elif "trouble" in line:
                troubles.append(line["trouble"])

        shutil.rmtree(local, ignore_errors=True)
        local.mkdir(mode=0o700, parents=True)
        request = self._request(asked, local).to_dict()
        trouble = self._help("gather", request, asked.began + KILL_PART * self._budget_s, hear)
        with self._lock:
            if self._dropped or self._closing:
                return asked.final, []
            self._publishing = True
        troubles += [trouble] if trouble else []
        place = self.directory_for(asked.final)
        if place == asked.final:
            until = max(asked.began + self._budget_s, time.monotonic() + PUBLISH_S)
            lost = self._publish(PublishRequest(str(place), str(local), rounds=self._kept_rounds), until)
            if lost:
                place = self._redirect(asked.round, asked.final)
                troubles.append(f"{asked.final} cannot be written ({lost}): the evidence is in {place}")
        return place, troubles

    def _request(self, asked: _Gather, local: Path) -> CollectRequest:
        ranks = tuple(
            WorkerRequest(
                target.rank,
                target.pid,
                tuple(str(log) for log in target.logs),
                *(
                    str(path) if path is not None else ""
                    for path in (target.heartbeat, target.stacks, target.flight, target.pipe, target.dump)
                ),
            )
            for target in asked.targets
            if target.pid > 0
        )
        spy = find_py_spy() if self._spy is None else self._spy
        nvml = find_nvml() if self._nvml is None else self._nvml
        left_s = asked.began + GATHER_PART * self._budget_s - time.monotonic()
        return CollectRequest(str(local), max(0.1, left_s), ranks, asked.why, spy, nvml)

    def _publish(self, keep: PublishRequest, until: float) -> str:
        """Have a helper do it. "" or what went wrong."""
        said: list[str] = []
        trouble = self._help("keep", keep.to_dict(), until, lambda line: said.append(line.get("trouble", "")))
        return next((one for one in said if one), trouble)

    def _redirect(self, number: int, final: Path) -> Path:
        """Where evidence goes whose directory does not answer, from now on."""
        return self._redirected.setdefault(final, self._fallback_dir / f"round-{number}" / final.name)

    def _help(self, what: str, request: dict[str, Any], until: float, hear: Callable[[dict[str, Any]], object]) -> str:
        """Run a helper until it ends, or until its time is over. "" or what went wrong."""
        began = time.monotonic()
        seconds = f"{max(0.0, until - began) + ORPHAN_S:.1f}"
        command = [sys.executable, "-I", "-S", program("evidence_collector"), what, seconds, *import_path()]
        try:
            helper = HelperProcess(command, cwd="/", keep_errors=True)
        except OSError as error:
            return f"no helper can be started: {error.strerror or error}"
        try:
            with self._lock:
                self._helper = helper
                if (self._closing and self._taking) or self._dropped:
                    helper.kill()
            helper.send(request, until)
            for message in helper.messages(until):
                hear(message)
        except HelperTimeout:
            return f"it did not answer within {until - began:.1f} s"
        except HelperError as error:
            return f"the helper ended: {error}"
        finally:
            with self._lock:
                self._helper = None
            helper.close(within_s=REAP_S)
        return ""


def _of(target: EvidenceTarget, line: dict[str, Any]) -> RankEvidence:
    return RankEvidence(
        target.rank,
        line.get("where", ""),
        line.get("function", ""),
        line.get("stack", ""),
        line.get("state") or procfs.state(target.pid),
        line.get("wchan", ""),
        line.get("source", ""),
        line.get("trouble", "there was no time for its stack"),
    )

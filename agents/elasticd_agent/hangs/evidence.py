"""Collects evidence of a hang before the group is killed: by helper processes, on local disk first, in bounded time.

What may hang (a process stuck in the kernel, a dead file system, a driver) is touched by helpers only (collector/). A
thread of this module starts them, receives what they report, and kills their session at their deadline: the deciding
thread never waits, and what was reported by then counts.

Evidence is written to a local directory first and published to the log directory afterwards. The log directory may be
the very file system that hangs; what lies in memory is still there when the group has been killed, and a later attempt
can move it.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticd.channel import Message
from elasticd.errors import WireError
from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector.record import NodeEvidence, RankEvidence
from elasticd_agent.hangs.collector.request import (
    CollectRequest,
    EvidenceTarget,
    PublishRequest,
    fallback_directory,
    to_message,
)
from elasticd_agent.system.gpus.nvml import find_pynvml_with_driver
from elasticd_agent.system.installation import import_path, program
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import HelperError, HelperProcess, HelperTimeout

__all__ = ["EvidenceCollector", "EvidenceTarget", "GatheredEvidence", "RankEvidence"]

GATHER_PART, KILL_PART = 0.8, 0.9
"""A helper gathers for the first part of the budget, and is killed after the second. The rest is for publishing."""
MAX_BUDGET_FACTOR = 8
"""A helper needs 3 to 5 s on a machine with 40 processes for each core for what takes 0.2 s elsewhere: after a
gathering that came too late, the next one has twice the budget, up to this many times. Nothing waits for it longer."""
MIN_PUBLISH_S = 1.0
"""The least time to publish: a directory is not dead because a busy machine took the whole budget to gather."""
PUBLISH_RETRY_TIMEOUT_S = 10.0
"""The time for a second attempt at a directory, for its replacement and for the verdict's files: nothing waits for
these."""
CLOSE_S = 3.0
ORPHAN_GRACE_S = 5.0
"""A helper whose agent was killed ends this long after its deadline."""
REAP_S = 0.5

_FIELDS_FROM_EARLIER = ("source", "processes", "log", "groups")
"""Fields of a rank that stay in the record when a later gathering could not take them."""

_log = logging.getLogger("elasticd.evidence")


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    round: int
    ranks: tuple[RankEvidence, ...]
    directory: Path
    took_s: float
    trouble: str = ""  #: the missing parts, and why they are missing
    lacked_time: bool = False
    """There was too little time for the stacks, or the flight recorder, of a process that could have shown them."""


@dataclass(frozen=True, slots=True)
class _GatherRequest:
    round: int
    targets: tuple[EvidenceTarget, ...]
    final: Path
    why: str
    began_at: float


@dataclass(frozen=True, slots=True)
class _WriteRequest:
    round: int
    name: str
    text: str
    final: Path


@dataclass(slots=True)
class _HelperReports:
    """A helper's reports so far."""

    began_at_wall: float  #: unix time
    ranks: dict[int, Message] = field(default_factory=dict)
    gpus: list[Message] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    gpu_troubles: list[str] = field(default_factory=list)

    def receive(self, message: Message) -> None:
        if "rank" in message:
            known = self.ranks.setdefault(message["rank"], {"processes": []})
            processes = [*known["processes"], *message.get("processes", ())]
            known.update(message, processes=processes)
        elif "gpus" in message:
            self.gpus = message["gpus"]
            self.gpu_troubles += [message["trouble"]] if message.get("trouble") else []
        elif "trouble" in message:
            self.troubles.append(message["trouble"])


class EvidenceCollector:
    """Gathers evidence, once at a time, in a thread that ends with `close`."""

    def __init__(
        self,
        scratch: Path,
        post: Callable[[GatheredEvidence], None],
        budget_s: float,
        keep: int = 8,
        job: str = "",
        node: str = "",
        spy: str | None = None,
        temporary: Path | None = None,
        nvml: str | None = None,
        ras: int = 0,
    ) -> None:
        """`scratch` is on local disk and may be deleted with the agent; the thread calls `post`; `node` is this one.

        `temporary` (the system's directory for that) gets a folder named `job` for evidence whose own directory does
        not answer. `ras` is the port of NCCL's RAS, 0 for none. `spy` is py-spy's path, "" for none, and `nvml` the
        directory of pynvml; None: found at need.
        """
        self._scratch = scratch
        self._post = post
        self._budget_s = budget_s
        self._kept_rounds = keep
        self._spy = spy
        self._nvml = nvml
        self._ras = ras
        self._node = node or os.uname().nodename
        self._published: dict[Path, NodeEvidence] = {}
        self._fallback_dir = fallback_directory(temporary) / (job or scratch.name)
        self._requests: queue.SimpleQueue[_GatherRequest | _WriteRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._helper: HelperProcess | None = None
        self._busy = self._taking = self._publishing = self._dropped = self._closing = self._warned = False
        self._budget_factor = 1
        self._redirected: dict[Path, Path] = {}

    def start_gathering(self, number: int, targets: Sequence[EvidenceTarget], final: Path, why: str) -> bool:
        """The result is posted within the budget (see MAX_BUDGET_FACTOR), or MIN_PUBLISH_S after it if that was used
        up.

        False if nothing begins: another gathering is under way, or no thread can be started.
        """
        with self._lock:
            if self._busy or self._closing:
                return False
            self._busy = True
        if not self._enqueue(_GatherRequest(number, tuple(targets), final, why, time.monotonic())):
            self._busy = False
            return False
        return True

    def write_later(self, number: int, name: str, text: str, final: Path) -> None:
        """Put a small file beside the evidence of round `number`, soon."""
        if not self._closing:
            self._enqueue(_WriteRequest(number, name, text, final))

    def directory_for(self, final: Path) -> Path:
        """`final`, or its replacement after it did not answer."""
        return self._redirected.get(final, final)

    def discard_current(self) -> None:
        """The processes are about to be ended: drop what is being gathered, keep what was gathered before."""
        with self._lock:
            if self._busy and not self._publishing:
                self._dropped = True
                self._kill_helper()

    def close(self) -> None:
        """Finish what is to be written, end everything else. Bounded; safe to call again."""
        with self._lock:
            self._closing = True
            if self._taking:
                self._kill_helper()
        if self._thread is not None:
            self._requests.put(None)
            # First the directory that does not answer, then its replacement.
            for over, seconds in ((False, PUBLISH_RETRY_TIMEOUT_S + CLOSE_S), (True, CLOSE_S)):
                self._thread.join(seconds)
                with self._lock:
                    self._dropped = over
                    self._kill_helper()
            self._thread.join(2 * REAP_S)

    def _kill_helper(self) -> None:
        if self._helper is not None:
            self._helper.kill()

    def _enqueue(self, request: _GatherRequest | _WriteRequest) -> bool:
        self._requests.put(request)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elasticd-evidence", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process has no room for another one; the next call tries again
                if not self._warned:  # while a suspicion lasts every look calls
                    _log.warning("evidence of round %d: %s", request.round, error)
                self._warned = True
                self._requests.get_nowait()
                return False
            self._thread = thread
        return True

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, _WriteRequest):
                self._publish_anywhere(request.round, request.final, file=(request.name, request.text))
            elif not self._closing:
                self._handle_gather(request)

    def _handle_gather(self, request: _GatherRequest) -> None:
        local = self._scratch / "evidence" / f"{request.round}-{request.final.name}"
        until = time.monotonic() + self._budget_s * self._budget_factor
        reported = _HelperReports(time.time())
        self._taking, late, published, publishes = True, False, True, False
        try:
            late = self._run_gather_helper(request, until, local, reported)
            with self._lock:
                publishes = self._publishing = not (self._dropped or self._closing)
            evidence = self._compose(request, reported)
            if publishes:
                record = self._fill_from_earlier(evidence, request.final)
                disk.write_atomically(str(local / record.file_name), record.to_json() + b"\n")
                published = self._publish_in_time(request, local, until)
            else:
                reported.troubles.clear()
        except Exception as error:  # noqa: BLE001 the detector waits for a result, also for none
            reported.troubles.append(f"no evidence: {type(error).__name__}: {error}")
            evidence = self._compose(request, reported)
        if reported.troubles:
            _log.info("evidence of round %d: %s", request.round, "; ".join(reported.troubles))
        late = late or any(rank.late for rank in evidence.ranks)
        late = publishes and (late or any(not rank.source and rank.state in ("R", "S") for rank in evidence.ranks))
        self._budget_factor = min(2 * self._budget_factor, MAX_BUDGET_FACTOR) if late else self._budget_factor
        if not published and request.why == DUMP_REASON:
            self._publish_anywhere(request.round, request.final, local)  # the person gets the place that it is in
        path, seconds = self.directory_for(request.final), time.monotonic() - request.began_at
        with self._lock:
            self._busy = self._taking = self._publishing = self._dropped = False
        self._post(GatheredEvidence(request.round, evidence.ranks, path, seconds, "; ".join(reported.troubles), late))
        if not published and request.why != DUMP_REASON:
            self._publish_anywhere(request.round, request.final, local)
        shutil.rmtree(local, ignore_errors=True)

    def _run_gather_helper(self, request: _GatherRequest, until: float, local: Path, reported: _HelperReports) -> bool:
        """Returns whether there was too little time."""
        shutil.rmtree(local, ignore_errors=True)
        local.mkdir(mode=0o700, parents=True)
        began = time.monotonic()
        collect = CollectRequest(
            str(local),
            max(0.1, GATHER_PART * (until - began)),
            tuple(target for target in request.targets if target.pid > 0),
            find_py_spy() if self._spy is None else self._spy,
            find_pynvml_with_driver() if self._nvml is None else self._nvml,
            self._ras,
        )
        trouble, late = self._run_helper("gather", collect, began + KILL_PART * (until - began), reported.receive)
        reported.troubles += [trouble] if trouble else []
        return late

    def _compose(self, request: _GatherRequest, reported: _HelperReports) -> NodeEvidence:
        """The record of this gathering."""
        why = "; ".join(reported.troubles) or "there was no time for its stack"
        ranks = []
        for target in request.targets:
            known = {"rank": target.rank, "pid": target.pid, "trouble": why, **reported.ranks.get(target.rank, {})}
            known["state"] = known.get("state") or procfs.state(target.pid)
            try:
                ranks.append(RankEvidence.from_dict(known))
            except WireError as error:
                ranks.append(RankEvidence(target.rank, target.pid, state=known["state"], trouble=str(error)))
        troubles = (*reported.troubles, *reported.gpu_troubles)
        return NodeEvidence(
            request.round, self._node, request.why, reported.began_at_wall, tuple(ranks), tuple(reported.gpus), troubles
        )

    def _fill_from_earlier(self, evidence: NodeEvidence, final: Path) -> NodeEvidence:
        """The record to publish: older stacks are better than none, the worker may have been ended meanwhile."""
        earlier = self._published.get(final)
        older = {rank.rank: rank for rank in earlier.ranks} if earlier is not None else {}
        ranks = []
        for rank in evidence.ranks:
            missing = [name for name in _FIELDS_FROM_EARLIER if rank.rank in older and not getattr(rank, name)]
            ranks.append(replace(rank, **{name: getattr(older[rank.rank], name) for name in missing}))
        record = replace(evidence, ranks=tuple(ranks)).shortened()
        self._published = {final: record}
        return record

    def _publish_in_time(self, request: _GatherRequest, local: Path, until: float) -> bool:
        """Before the result is posted. False: not done, and to be tried again."""
        if self.directory_for(request.final) != request.final:
            return False
        until = max(until, time.monotonic() + MIN_PUBLISH_S)
        trouble, late = self._publish(PublishRequest(str(request.final), str(local), rounds=self._kept_rounds), until)
        if trouble and not late:
            self._redirect(request.round, request.final, trouble)
        return not trouble

    def _publish_anywhere(
        self, number: int, final: Path, local: Path | None = None, file: tuple[str, str] | None = None
    ) -> None:
        """Into the log directory or, if it does not answer, into another one. A message says what is lost."""
        source = "" if local is None else str(local)
        trouble, place = "", self.directory_for(final)
        if place == final:
            request = PublishRequest(str(place), source, file, self._kept_rounds if local is not None else 0)
            trouble, _ = self._publish(request, time.monotonic() + PUBLISH_RETRY_TIMEOUT_S)
            if not trouble:
                return
            place = self._redirect(number, final, trouble)
        if place != final:
            request = PublishRequest(str(place), source, file, self._kept_rounds)
            trouble, _ = self._publish(request, time.monotonic() + PUBLISH_RETRY_TIMEOUT_S)
        if trouble and not self._closing:
            lost = file[0] if file is not None else "the evidence"
            _log.warning("%s of round %d is lost: %s cannot be written: %s", lost, number, place, trouble)

    def _publish(self, request: PublishRequest, until: float) -> tuple[str, bool]:
        """Returns what went wrong, and whether that was for lack of time."""
        troubles: list[str] = []
        trouble, late = self._run_helper(
            "publish", request, until, lambda line: troubles.append(line.get("trouble", ""))
        )
        return next((text for text in troubles if text), trouble), late

    def _redirect(self, number: int, final: Path, why: str) -> Path:
        """Evidence for `final`, which cannot be written, goes elsewhere from now on; `final` itself if it is there."""
        place = self._fallback_dir / f"round-{number}" / final.name
        if final not in self._redirected and place != final:
            self._redirected[final] = place
            _log.warning("the evidence of round %d is in %s: %s cannot be written: %s", number, place, final, why)
        return self.directory_for(final)

    def _run_helper(
        self,
        verb: str,
        request: CollectRequest | PublishRequest,
        until: float,
        receive: Callable[[Message], object],
    ) -> tuple[str, bool]:
        """Run a helper to its end, or to its deadline. Returns what went wrong, and whether that was the deadline."""
        began = time.monotonic()
        seconds = f"{max(0.0, until - began) + ORPHAN_GRACE_S:.1f}"
        command = [sys.executable, "-I", "-S", program("evidence_collector"), verb, seconds, *import_path()]
        try:
            helper = HelperProcess(command, cwd="/", keep_errors=True)
        except OSError as error:
            return f"no helper can be started: {error.strerror or error}", False
        try:
            with self._lock:
                self._helper = helper
                if (self._closing and self._taking) or self._dropped:
                    helper.kill()
            helper.send(to_message(request), until)
            for message in helper.messages(until):
                receive(message)
        except HelperTimeout:
            return f"it did not answer within {until - began:.1f} s", True
        except HelperError as error:
            return f"the helper ended: {error}", False
        finally:
            with self._lock:
                self._helper = None
            helper.close(within_s=REAP_S)
        return "", False


def find_py_spy() -> str:
    """The path of py-spy: beside this interpreter, where pip puts it, or on the PATH. "" if it is nowhere."""
    beside = [Path(sys.executable).with_name("py-spy"), Path(sysconfig.get_path("scripts")) / "py-spy"]
    path_beside = next((str(path) for path in beside if os.access(path, os.X_OK)), None)
    return path_beside or shutil.which("py-spy") or ""

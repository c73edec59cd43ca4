"""A folder of evidence, and perhaps an event log -> Explanation.

A missing, cut or nonsensical file costs only what it would have said, and is named. No link is followed, and no number
is believed that makes no sense. Everything that may wait for a file system is in this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from elasticd.errors import WireError
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector.request import NO_STACKS, VERDICT
from elasticd_agent.hangs.explain import phrases
from elasticd_agent.hangs.explain.event_log import RunLog, ends_job
from elasticd_agent.hangs.explain.json_values import clock_time, count, items, text, whole
from elasticd_agent.hangs.explain.locate import EvidenceFolder
from elasticd_agent.hangs.explain.model import (
    Aftermath,
    EvidenceKind,
    Explanation,
    GpuFacts,
    RankFacts,
    StackGroup,
    name_ranks,
)
from elasticd_agent.hangs.stacks import Frame, ProcessStacks, RankStacks, ThreadStack
from elasticd_agent.model.codec import Record
from elasticd_agent.model.log_events import JobEndedEvent, RoundPublishedEvent, decode
from elasticd_agent.model.reports import HangReport, RecordedVerdict
from elasticd_agent.system import bounded_io as files

MOST_RANKS = 4096
LOG_LINES = 200
EVENT_LOG_LIMIT = 32 << 20
_LOG_LIMIT = 1 << 20
_MOST_NODES = 4
_MOST_CHILDREN = 64
_MOST_GPUS = 64
_MOST_GPU_FACTS = 16
_BAD_GPU_FACTS = ("xid", "ecc", "uncorrected", "lost", "error", "remap", "retired")
"""Parts of NVML's names: a value other than the good ones there is what a person looks for."""
_GOOD_VALUES = ("0", "", "[]", "False", "none", "None", "0x0")
_REPORTED = (
    "slot", "phase", "step", "collectives", "usual", "barrier", "idle_s", "state", "stopped_s", "cpu_s", "io_bytes",
    "window_s", "where", "function", "exited",
)  # fmt: skip
"""The fields of a RankReport that a page shows."""
MOST_PROCESSES = 64
MOST_THREADS = 256
MOST_FRAMES = 512


_Record = TypeVar("_Record", bound=Record)


def explain(
    folder: EvidenceFolder,
    events: Path | None = None,
    others: Sequence[EvidenceFolder] = (),
    here: str = "",
    verdict: RecordedVerdict | None = None,
) -> Explanation:
    """All that is known of one folder.

    `events`: the event log; `others`: the other folders, to be named; `here`: the node of ranks for which no file names
    one; `verdict`: where it may not have been written yet.
    """
    reader = _Reader(folder)
    judged = verdict or reader.record(RecordedVerdict, reader.json(VERDICT, RecordedVerdict.MAX_BYTES), VERDICT)
    reader.read_reports(judged)
    for rank in folder.ranks[:MOST_RANKS]:
        reader.read_rank(rank)
    log = RunLog.of(reader.event_lines(events), folder.round, reader.taken_at)
    judged = judged or log.verdict()
    reason = log.restart_reason() if judged is None else ""
    ranks = _complete(reader.ranks, judged, log, here)
    if reason:
        away = sorted(set(log.members()) - {rank.node for rank in ranks})
        where = f": {' or '.join(away)}" if 0 < len(away) <= _MOST_NODES else ""
        reader.add_trouble(f"the verdict, with all ranks' facts, is in the log directory of another node{where}")
    kind: EvidenceKind = "suspicion"
    if judged is not None or reason:
        kind = "hang"
    elif folder.is_dump or reader.why == DUMP_REASON:
        kind = "dump"
    return Explanation(
        round=folder.round,
        kind=kind,
        directory=str(folder.path),
        elsewhere=str(folder.elsewhere.path) if folder.elsewhere is not None else "",
        headline=phrases.headline(folder.round, kind, judged, ranks, reason or reader.why),
        taken_at=reader.taken_at,
        job=log.job,
        verdict=judged,
        ranks=ranks,
        stack_groups=_stack_groups(ranks),
        waiting=phrases.describe_waits(ranks),
        flight=tuple(recordings.compare(reader.recordings())),
        gpus=reader.gpus(),
        aftermath=_aftermath(log, folder),
        troubles=(*reader.troubles, *_missing(folder, ranks)),
        others=tuple(_other(folder, other) for other in others if other.path != folder.path),
    )


def ending(events: Path | None) -> str:
    """The end of the job, by the event log, as the end of a sentence; "" if it runs or there is no log."""
    lines = files.read_lines(events, EVENT_LOG_LIMIT)[0] if events is not None else []
    logged = (line.event for line in map(decode, reversed(lines)) if line is not None)
    last = next((event for event in logged if isinstance(event, RoundPublishedEvent) or ends_job(event)), None)
    return f"; the job has {last.outcome}: {last.reason}" if isinstance(last, JobEndedEvent) else ""


@dataclass(slots=True)
class _Reader:
    """The facts read of a folder so far, by rank, and the troubles met."""

    folder: EvidenceFolder
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    taken_at: float = 0.0
    why: str = ""

    def add_trouble(self, trouble: str) -> None:
        if trouble:
            self.troubles.append(trouble)

    def json(self, name: str, limit: int = files.TEXT_LIMIT) -> dict[str, Any] | None:
        data, trouble = files.read_json(self.folder.file(name), limit)
        self.add_trouble(trouble)
        return data

    def lines(self, path: Path, limit: int = files.TEXT_LIMIT) -> list[dict[str, Any]]:
        lines, trouble = files.read_lines(path, limit)
        self.add_trouble(trouble)
        return lines

    def event_lines(self, events: Path | None) -> list[dict[str, Any]]:
        return self.lines(events, EVENT_LOG_LIMIT) if events is not None else []

    def record(self, kind: type[_Record], data: object, name: str) -> _Record | None:
        """The record that these JSON values make; None if there are none, or if they make none."""
        try:
            return kind.from_dict(data) if data is not None else None
        except WireError as error:
            self.add_trouble(f"{name} cannot be read: {error}")
            return None

    def read_reports(self, judged: RecordedVerdict | None) -> None:
        """The newest report of every node: the verdict's, of all nodes, then those that the nodes wrote themselves.

        The verdict was made on the former: a later report may be of a group that is being killed.
        """
        reports = {report.node: report for report in (judged.reports if judged is not None else ())}
        for name in self.folder.names:
            if name.startswith("reports-") and name.endswith(".jsonl"):
                for line in self.lines(self.folder.file(name))[-1:]:
                    report = self.record(HangReport, line, name)
                    if report is not None:
                        reports.setdefault(report.node, report)
        for node, report in reports.items():
            for rank in report.ranks:
                if 0 <= rank.rank < MOST_RANKS:
                    reported = {name: getattr(rank, name) for name in _REPORTED}
                    self.ranks[rank.rank] = RankFacts(rank.rank, node=node, **reported)

    def read_rank(self, rank: int) -> None:
        facts = self.json(f"rank-{rank}.json") or {}
        log = files.read(self.folder.file(f"rank-{rank}.log"), _LOG_LIMIT, tail=True)
        self.add_trouble(log.trouble)
        decoded = decode_stacks(self.json(f"rank-{rank}.stacks.json") or {})
        self.taken_at = max(self.taken_at, clock_time(facts.get("at_wall")))
        self.why = self.why or text(facts.get("why"))
        self.ranks[rank] = replace(
            _with_facts(self.ranks.get(rank) or RankFacts(rank), facts),
            log=tuple(log.text.splitlines()[-LOG_LINES:]),
            stacks=decoded,
            no_stacks="" if decoded is not None else self._why_no_stacks(rank),
        )

    def _why_no_stacks(self, rank: int) -> str:
        written = files.read(self.folder.file(f"rank-{rank}.stacks.txt"))
        self.add_trouble(written.trouble)
        if written.missing:
            return "none were taken"
        first = next((line for line in written.text.splitlines() if line), "empty")
        return first.removeprefix(NO_STACKS)[:300] if first.startswith(NO_STACKS) else "they are in the text file only"

    def recordings(self) -> dict[int, recordings.Recording]:
        recorded = {}
        for rank in self.folder.ranks[:MOST_RANKS]:
            name = f"rank-{rank}.flight.json"
            data = self.json(name, 16 << 20) if name in self.folder.names else None
            if data is None:
                continue
            recording = recordings.parse(data)
            if recording is not None:
                recorded[rank] = recording
            else:
                self.add_trouble(f"{name} holds no flight recording")
        return recorded

    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs of every node. A GPU that fell off the bus looks like a hang of the rank that waits for it."""
        facts: list[GpuFacts] = []
        for name in self.folder.names:
            if not (name.startswith("gpu") and name.endswith(".json")):
                continue
            data = self.json(name) or {}
            node = name.removeprefix("gpu").removesuffix(".json").lstrip("-")
            if isinstance(data.get("trouble"), str):
                self.add_trouble(f"{name}: {data['trouble'][:200]}")
            numbered = enumerate(items(data.get("gpus"), _MOST_GPUS))
            facts += [_gpu(gpu, f"{node} " if node else "", index) for index, gpu in numbered]
        return tuple(facts)


def _with_facts(rank: RankFacts, facts: Mapping[str, Any]) -> RankFacts:
    """The rank with what rank-R.json adds. A report goes before it: the verdict was made on the reports."""
    kernel = facts.get("kernel_stack")
    children = [
        process for process in items(facts.get("processes"), _MOST_CHILDREN) if process.get("pid") != facts.get("pid")
    ]
    return replace(
        rank,
        node=rank.node or text(facts.get("node")),
        pid=count(facts.get("pid")),
        phase=rank.phase or text(facts.get("phase")),
        step=rank.step if rank.step >= 0 else count(facts.get("step")),
        collectives=rank.collectives if rank.collectives >= 0 else count(facts.get("collectives")),
        state=rank.state or text(facts.get("state"))[:1],
        where=rank.where or text(facts.get("where")),
        function=rank.function or text(facts.get("function")),
        wchan=text(facts.get("wchan")),
        call=_call(facts.get("syscall")),
        kernel=tuple(line for line in kernel if isinstance(line, str))[:32] if isinstance(kernel, list) else (),
        children=tuple(_child(process) for process in children),
    )


def _complete(
    found: Mapping[int, RankFacts], verdict: RecordedVerdict | None, log: RunLog, here: str
) -> tuple[RankFacts, ...]:
    """The ranks in order, with what only verdict and log say of them, and the remarks on all of it."""
    blamed = {culprit.rank for culprit in verdict.culprits} if verdict is not None else set()
    nodes = log.node_by_rank()
    ranks = [
        replace(facts, culprit=rank in blamed, node=facts.node or nodes.get(rank, here))
        for rank, facts in sorted(found.items())
    ]
    return tuple(replace(rank, remarks=phrases.remarks(rank)) for rank in ranks)


def _aftermath(log: RunLog, folder: EvidenceFolder) -> Aftermath:
    """Without an event log at least the next round's folder says that there was one."""
    aftermath = log.aftermath()
    if aftermath.round or folder.logs is None or not folder.round:
        return aftermath
    rounds = [name.removeprefix("round-") for name in files.entry_names(folder.logs) if name.startswith("round-")]
    later = [int(n) for n in rounds if n.isdecimal() and len(n) < 10 and int(n) > folder.round]
    return replace(aftermath, round=min(later, default=0))


def _call(call: object) -> str:
    """ "read of /job/data.bin" """
    if not isinstance(call, dict):
        return ""
    name = text(call.get("name")) or (f"system call {number}" if (number := whole(call.get("number"))) else "")
    target = text(call.get("target"))
    return f"{name} of {target}" if name and target else name


def _child(one: Mapping[str, Any]) -> str:
    """ "pt_data_worker (pid 71) sleeping, in futex_wait_queue" """
    state = phrases.STATE_NAMES.get(text(one.get("state"))[:1], "?")
    wchan = text(one.get("wchan"))
    return f"{text(one.get('comm')) or '?'} (pid {whole(one.get('pid'))}) {state}" + (f", in {wchan}" if wchan else "")


def _stack_groups(ranks: Sequence[RankFacts]) -> tuple[StackGroup, ...]:
    """Ranks by where their main threads are; the culprits' first, then the smaller groups: those differ."""
    by_place: dict[object, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        if rank.stacks is not None:
            by_place[rank.stacks.key].append(rank)
    groups = sorted(by_place.values(), key=lambda group: (not any(r.culprit for r in group), len(group), group[0].rank))
    most = max((len(group) for group in groups), default=0)
    return tuple(
        StackGroup(tuple(rank.rank for rank in group), group[0].stacks, len(group) < most)
        for group in groups
        if group[0].stacks is not None
    )


def _missing(folder: EvidenceFolder, ranks: Sequence[RankFacts]) -> Iterable[str]:
    here = set(folder.ranks)
    away: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        if rank.rank not in here and not rank.exited:
            away[rank.node].append(rank.rank)
    if len(away) > _MOST_NODES:
        missed = [rank for numbers in away.values() for rank in numbers]
        yield f"no evidence of {name_ranks(missed)} is here: look in the log directories of their {len(away)} nodes"
    else:
        for node, numbers in sorted(away.items()):
            yield f"no evidence of {name_ranks(numbers)} is here: look in the log directory on {node or 'its node'}"
    bare = [rank for rank in ranks if rank.rank in here and rank.stacks is None]
    if bare:
        why = "; ".join(sorted({rank.no_stacks for rank in bare if rank.no_stacks})[:3])
        yield f"no stacks of {name_ranks([rank.rank for rank in bare])}" + (f": {why}" if why else "")


def _other(folder: EvidenceFolder, other: EvidenceFolder) -> str:
    return f"round {other.round} ({other.what}{'' if other.round != folder.round else ', ' + other.path.name})"


def decode_stacks(data: Mapping[str, Any]) -> RankStacks | None:
    """The stacks in the file's object; None without a thread of the rank's own process."""
    processes = [
        ProcessStacks(count(process_data.get("pid")), text(process_data.get("comm")), tuple(_threads(process_data)))
        for process_data in items(data.get("processes"), MOST_PROCESSES)
    ]
    if not processes or not processes[0].threads:
        return None
    return RankStacks(text(data.get("source")), tuple(process for process in processes if process.threads))


def _threads(process: Mapping[str, Any]) -> list[ThreadStack]:
    return [
        ThreadStack(
            text(thread.get("name")),
            text(thread.get("tid")),
            tuple(
                Frame(text(frame.get("function")), text(frame.get("file")), max(0, count(frame.get("line"))))
                for frame in items(thread.get("frames"), MOST_FRAMES)
            ),
            text(thread.get("state")),
        )
        for thread in items(process.get("threads"), MOST_THREADS)
    ]


def _gpu(one: dict[str, Any], node: str, index: int) -> GpuFacts:
    facts = tuple(
        (name, str(value)[:200])
        for name, value in one.items()
        if value is not None and not isinstance(value, dict) and name not in ("index", "name")
    )[:_MOST_GPU_FACTS]
    bad = [
        f"{name} {value}"
        for name, value in facts
        if any(word in name for word in _BAD_GPU_FACTS) and value not in _GOOD_VALUES
    ]
    number, model = one.get("index", index), one.get("name")
    return GpuFacts(
        f"{node}GPU {number}" + (f" ({model[:80]})" if isinstance(model, str) else ""), facts, ", ".join(bad)
    )

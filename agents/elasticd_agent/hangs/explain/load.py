"""A folder of evidence, and perhaps an event log -> Explanation.

A file that is missing, cut or no record costs only what it would have said, and is named. No link is followed.
Everything that may wait for a file system is in this module.

The folder was written while things failed, by processes that were killed on the way, and perhaps by another version. So
nothing in it is required: each file that can be read adds facts, each one that cannot adds a sentence to `troubles`,
and the explanation is made of what is there. Reading is bounded in size, and links are not followed, as the directory
may be writable by the job's user.

Where two sources speak of the same rank, the one that the verdict was made on wins: its reports, then the nodes' own
reports, then the evidence, then the event log. What came later may describe processes that were already being killed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from elasticd.errors import WireError
from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector.record import NodeEvidence, ProcessFacts, RankEvidence
from elasticd_agent.hangs.collector.request import VERDICT_FILE
from elasticd_agent.hangs.explain import phrases
from elasticd_agent.hangs.explain.event_log import RunLog, ends_job
from elasticd_agent.hangs.explain.flight import compare_groups
from elasticd_agent.hangs.explain.locate import EvidenceFolder
from elasticd_agent.hangs.explain.model import (
    Aftermath,
    Explanation,
    ExplanationKind,
    GpuFacts,
    RankFacts,
    StackGroup,
    describe_ranks,
)
from elasticd_agent.hangs.stacks import ThreadStack, place_key
from elasticd_agent.model.codec import Document
from elasticd_agent.model.log_events import JobEndedEvent, RoundPublishedEvent, decode
from elasticd_agent.model.reports import HangReport, RankReport, RecordedVerdict
from elasticd_agent.system import bounded_io as files

MAX_RANKS = 4096
MAX_EVENT_LOG_BYTES = 32 << 20
_MAX_NODES_NAMED = 4
_MAX_CHILDREN = 64
_MAX_GPUS = 64
_MAX_GPU_FACTS = 16
_GPU_FAULT_WORDS = ("xid", "ecc", "uncorrected", "lost", "error", "remap", "retired")
"""Parts of NVML's names: a value other than the good ones there is what a person looks for."""
_HARMLESS_GPU_VALUES = ("0", "", "[]", "False", "none", "None", "0x0")
_EVIDENCE_FIELDS = tuple(f.name for f in fields(RankEvidence))
_REPORT_FIELDS = tuple(f.name for f in fields(RankReport) if f.name in {known.name for known in fields(RankFacts)})
_EARLIER_VERSION_FILES = re.compile(r"rank-\d+\.(?:json|stacks\.json)")

_Document = TypeVar("_Document", bound=Document)


def explain(
    folder: EvidenceFolder,
    events: Path | None = None,
    others: Sequence[EvidenceFolder] = (),
    default_node: str = "",
    verdict: RecordedVerdict | None = None,
) -> Explanation:
    """All that is known of one folder.

    `events`: the event log; `others`: the other folders, to be named; `default_node`: the node of ranks for which no
    file names one; `verdict`: where it may not have been written yet.
    """
    reader = _Reader(folder)
    judged = verdict or reader.read_document(RecordedVerdict, VERDICT_FILE)
    reader.read_evidence()
    reader.read_reports(judged)
    taken_at, why = (
        max((e.at_wall for e in reader.evidence), default=0.0),
        next((e.why for e in reader.evidence if e.why), ""),
    )
    log = RunLog.run_with_round(reader.read_event_lines(events), folder.round, taken_at)
    judged = judged or log.verdict()
    reason = log.hang_restart_reason() if judged is None else ""
    ranks = _add_verdict_and_remarks(reader.ranks, judged, log, default_node)
    if reason:
        away = sorted(set(log.member_nodes()) - {rank.node for rank in ranks})
        where = f": {' or '.join(away)}" if 0 < len(away) <= _MAX_NODES_NAMED else ""
        reader.troubles.append(f"the verdict, with all ranks' facts, is in the log directory of another node{where}")
    kind: ExplanationKind = "suspicion"
    if judged is not None or reason:
        kind = "hang"
    elif folder.is_dump or why == DUMP_REASON:
        kind = "dump"
    return Explanation(
        round=folder.round,
        kind=kind,
        directory=str(folder.path),
        headline=phrases.headline(folder.round, kind, judged, ranks, reason or why),
        taken_at=taken_at,
        job=log.job,
        verdict=judged,
        ranks=ranks,
        stack_groups=_stack_groups(ranks),
        wait_sentences=phrases.describe_waits(ranks),
        group_comparisons=tuple(compare_groups({rank.rank: rank.groups for rank in ranks if rank.groups})),
        gpus=tuple(gpu for node in reader.evidence for gpu in _gpus(node)),
        aftermath=_aftermath(log, folder),
        troubles=(*reader.troubles, *_describe_missing(reader.evidence, ranks)),
        other_folders=tuple(_describe_folder(folder, other) for other in others if other.path != folder.path),
    )


def read_verdict(folder: EvidenceFolder) -> RecordedVerdict | None:
    """The verdict in the folder, if it can be read."""
    return _Reader(folder).read_document(RecordedVerdict, VERDICT_FILE)


def describe_job_end(events: Path | None) -> str:
    """The end of the job, by the event log, as the end of a sentence; "" if it runs or there is no log."""
    lines = files.read_json_lines(events, MAX_EVENT_LOG_BYTES)[0] if events is not None else []
    logged = (line.event for line in map(decode, reversed(lines)) if line is not None)
    last = next((event for event in logged if isinstance(event, RoundPublishedEvent) or ends_job(event)), None)
    return f"; the job has {last.outcome}: {last.reason}" if isinstance(last, JobEndedEvent) else ""


@dataclass(slots=True)
class _Reader:
    """The records read of a folder so far, the ranks in them by number, and the troubles met."""

    folder: EvidenceFolder
    evidence: list[NodeEvidence] = field(default_factory=list)
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def read_document(self, kind: type[_Document], name: str) -> _Document | None:
        """The record in the file; None if there is none."""
        file = files.read(self.folder.path / name, kind.MAX_BYTES)
        self.troubles += [file.trouble] if file.trouble else []
        return None if file.missing or file.trouble else self._decode(kind, name, file.text)

    def _decode(self, kind: type[_Document], name: str, text: str) -> _Document | None:
        try:
            return kind.from_json(text)
        except WireError as error:
            self.troubles.append(f"{name} cannot be read: {error}")
            return None

    def read_event_lines(self, events: Path | None) -> list[dict[str, Any]]:
        """Return the lines of the event log, none if it cannot be read."""
        lines, trouble = files.read_json_lines(events, MAX_EVENT_LOG_BYTES) if events is not None else ([], "")
        self.troubles += [trouble] if trouble else []
        return lines

    def read_evidence(self) -> None:
        """Read the evidence of all nodes in the folder."""
        if any(map(_EARLIER_VERSION_FILES.fullmatch, self.folder.file_names)):
            self.troubles.append("files of ranks from an earlier version are here: they are text, and not shown")
        for name in self.folder.file_names:
            if name.startswith("evidence-") and (node := self.read_document(NodeEvidence, name)) is not None:
                self.evidence.append(node)
                self.troubles += [f"{node.node}: {trouble}" for trouble in node.troubles]
                for rank in node.ranks:
                    if 0 <= rank.rank < MAX_RANKS:
                        self.ranks[rank.rank] = _rank_facts(rank, node.node)

    def read_reports(self, judged: RecordedVerdict | None) -> None:
        """The newest report of every node: the verdict's, of all nodes, then those that the nodes wrote themselves.

        The verdict was made on the former: a later report may be of a group that is being killed. A report goes before
        the evidence for the same reason.
        """
        reports = {report.node: report for report in (judged.reports if judged is not None else ())}
        for name in self.folder.file_names:
            if name.startswith("reports-") and name.endswith(".jsonl"):
                file = files.read(self.folder.path / name, HangReport.MAX_BYTES, tail=True)
                self.troubles += [file.trouble] if file.trouble else []
                for line in file.text.splitlines()[-1:]:
                    if (report := self._decode(HangReport, name, line)) is not None:
                        reports.setdefault(report.node, report)
        for node, report in reports.items():
            for rank in report.ranks:
                if 0 <= rank.rank < MAX_RANKS:
                    known = self.ranks.get(rank.rank) or RankFacts(rank.rank)
                    reported = {name: getattr(rank, name) for name in _REPORT_FIELDS}
                    told = {name: value for name, value in reported.items() if value not in ("", -1, ())}
                    self.ranks[rank.rank] = replace(known, **told, node=node)


def _rank_facts(rank: RankEvidence, node: str) -> RankFacts:
    children = tuple(_describe_child(process) for process in rank.tree[:_MAX_CHILDREN] if process.pid != rank.pid)
    return RankFacts(**{name: getattr(rank, name) for name in _EVIDENCE_FIELDS}, node=node, children=children)


def _add_verdict_and_remarks(
    found: Mapping[int, RankFacts], verdict: RecordedVerdict | None, log: RunLog, default_node: str
) -> tuple[RankFacts, ...]:
    """The ranks in order, with what only verdict and log say of them, and the remarks on all of it."""
    blamed = {culprit.rank for culprit in verdict.culprits} if verdict is not None else set()
    nodes = log.node_by_rank()
    ranks = [
        replace(facts, culprit=rank in blamed, node=facts.node or nodes.get(rank, default_node))
        for rank, facts in sorted(found.items())
    ]
    return tuple(replace(rank, remarks=phrases.remarks(rank)) for rank in ranks)


def _aftermath(log: RunLog, folder: EvidenceFolder) -> Aftermath:
    """Without an event log at least the next round's folder says that there was one."""
    aftermath = log.aftermath()
    if aftermath.round or folder.log_dir is None or not folder.round:
        return aftermath
    rounds = [name.removeprefix("round-") for name in files.entry_names(folder.log_dir) if name.startswith("round-")]
    later = [int(n) for n in rounds if n.isdecimal() and len(n) < 10 and int(n) > folder.round]
    return replace(aftermath, round=min(later, default=0))


def _describe_child(process: ProcessFacts) -> str:
    """ "pt_data_worker (pid 71) sleeping, in futex_wait_queue" """
    state = phrases.STATE_NAMES.get(process.state, "?")
    return f"{process.comm or '?'} (pid {process.pid}) {state}" + (f", in {process.wchan}" if process.wchan else "")


def _stack_groups(ranks: Sequence[RankFacts]) -> tuple[StackGroup, ...]:
    """Ranks by where their main threads are; the culprits' first, then the smaller groups: those differ."""
    by_place: dict[object, list[tuple[RankFacts, ThreadStack]]] = defaultdict(list)
    for rank in ranks:
        if rank.main_thread is not None:
            by_place[place_key(rank.main_thread)].append((rank, rank.main_thread))
    most = max((len(group) for group in by_place.values()), default=0)
    groups = [
        StackGroup(tuple(rank.rank for rank, _ in group), *group[0], is_minority=len(group) < most)
        for group in by_place.values()
    ]
    blamed = {rank.rank for rank in ranks if rank.culprit}
    return tuple(sorted(groups, key=lambda group: (blamed.isdisjoint(group.ranks), len(group.ranks), group.ranks)))


def _describe_missing(evidence: Sequence[NodeEvidence], ranks: Sequence[RankFacts]) -> Iterable[str]:
    """Yield a sentence for each kind of evidence that should be there and is not."""
    here = {rank.rank for node in evidence for rank in node.ranks}
    away: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        if rank.rank not in here and not rank.exited:
            away[rank.node].append(rank.rank)
    if len(away) > _MAX_NODES_NAMED:
        missed = [rank for numbers in away.values() for rank in numbers]
        yield f"no evidence of {describe_ranks(missed)} is here: look in the log directories of their {len(away)} nodes"
    else:
        for node, numbers in sorted(away.items()):
            yield f"no evidence of {describe_ranks(numbers)} is here: look in the log directory on {node or 'its node'}"
    bare = [rank for rank in ranks if rank.rank in here and rank.main_thread is None]
    if bare:
        why = "; ".join(sorted({rank.trouble for rank in bare if rank.trouble})[:3])
        yield f"no stacks of {describe_ranks([rank.rank for rank in bare])}" + (f": {why}" if why else "")


def _describe_folder(folder: EvidenceFolder, other: EvidenceFolder) -> str:
    return (
        f"round {other.round} ({other.reason_in_words}{'' if other.round != folder.round else ', ' + other.path.name})"
    )


def _gpus(evidence: NodeEvidence) -> list[GpuFacts]:
    """The GPUs of one node. A GPU that fell off the bus looks like a hang of the rank that waits for it."""
    return [_gpu(gpu, evidence.node, index) for index, gpu in enumerate(evidence.gpus[:_MAX_GPUS])]


def _gpu(gpu: Mapping[str, Any], node: str, index: int) -> GpuFacts:
    """Return the facts of one GPU, with those that look wrong in words."""
    facts = tuple(
        (name, str(value)[:200])
        for name, value in gpu.items()
        if value is not None and not isinstance(value, dict) and name not in ("index", "name")
    )[:_MAX_GPU_FACTS]
    bad = [
        f"{name} {value}"
        for name, value in facts
        if any(word in name for word in _GPU_FAULT_WORDS) and value not in _HARMLESS_GPU_VALUES
    ]
    number, model = gpu.get("index", index), gpu.get("name")
    name = f"{node} GPU {number}" + (f" ({model[:80]})" if isinstance(model, str) else "")
    return GpuFacts(name, facts, ", ".join(bad))

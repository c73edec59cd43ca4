"""A folder of evidence, and perhaps an event log -> Explanation.

It exists so that every missing, cut or nonsensical file costs only what it would have said, and is named. It writes
nothing, follows no links and believes no number that makes no sense. What waits for a file system waits here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticd_agent.hangs.explain import event_log as following
from elasticd_agent.hangs.explain import flight_recorder as flight
from elasticd_agent.hangs.explain import gpus, stacks
from elasticd_agent.hangs.explain import phrases as wording
from elasticd_agent.hangs.explain.event_log import text, whole
from elasticd_agent.hangs.explain.locate import VERDICT, EvidenceFolder
from elasticd_agent.hangs.explain.model import (
    Culprit,
    EvidenceKind,
    Explanation,
    RankFacts,
    RecordedVerdict,
    StackGroup,
    name_ranks,
)
from elasticd_agent.system import bounded_io as files

MOST_RANKS = 4096
LOG_LINES = 200
EVENT_LOG_LIMIT = 32 << 20
_LOG_LIMIT = 1 << 20
_MOST_NODES = 4
_MOST_CHILDREN = 64


@dataclass(slots=True)
class _Partial:
    """What has been read so far, by rank, and what was wrong."""

    ranks: dict[int, RankFacts] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    taken_at: float = 0.0
    why: str = ""

    def add_trouble(self, trouble: str) -> None:
        if trouble:
            self.troubles.append(trouble)

    def rank(self, number: int) -> RankFacts:
        return self.ranks.get(number) or RankFacts(number)


def explain(
    place: EvidenceFolder,
    events: Path | None = None,
    others: Sequence[EvidenceFolder] = (),
    here: str = "",
    verdict: Mapping[str, Any] | None = None,
) -> Explanation:
    """All that is known of one folder.

    `events`: the event log; `others`: the rest of what there is, to be named; `here`: the node of ranks that nothing
    says a node of; `verdict`: what verdict.json says, where it may not have been written yet.
    """
    found = _Partial()
    judged = _verdict(_read_verdict(place, found) if verdict is None else verdict)
    _reports(place, found)
    for rank in place.ranks[:MOST_RANKS]:
        _rank_files(place.path, rank, found)
    lines = following.lines_of_run(_lines(events, found), place.round, found.taken_at)
    followed = following.aftermath(lines, place.round)
    judged = judged or following.verdict(lines, place.round)
    reason = following.restart_reason(lines, place.round) if judged is None else ""
    blamed = {culprit.rank for culprit in judged.culprits} if judged is not None else set()
    nodes = following.node_by_rank(lines, place.round)
    ranks = tuple(
        _finished(replace(facts, culprit=rank in blamed, node=facts.node or nodes.get(rank, here)))
        for rank, facts in sorted(found.ranks.items())
    )
    if reason:
        away = sorted(set(following.members(lines, place.round)) - {rank.node for rank in ranks})
        found.add_trouble(f"the verdict, with all ranks' facts, is in the log directory of another node{_named(away)}")
    recorded = _recorded(place, found)
    kind: EvidenceKind = "hang" if judged is not None or reason else "dump" if _asked_for(place, found) else "suspicion"
    if followed.round == 0 and place.logs is not None and place.round:
        followed = replace(followed, round=_next_round(place))
    return Explanation(
        round=place.round,
        kind=kind,
        directory=str(place.path),
        headline=wording.headline(place.round, kind, judged, ranks, reason or found.why),
        taken_at=found.taken_at,
        job=next((text(line.get("job")) for line in reversed(lines)), ""),
        verdict=judged,
        ranks=ranks,
        stack_groups=_same(ranks),
        waiting=wording.describe_waits(ranks),
        flight=tuple(flight.compare(recorded)),
        gpus=gpus.read_gpus(place, found.add_trouble),
        aftermath=followed,
        troubles=(*found.troubles, *_missing(place, ranks)),
        others=tuple(_other(place, other) for other in others if other.path != place.path),
    )


def _read_verdict(place: EvidenceFolder, found: _Partial) -> Mapping[str, Any] | None:
    data, trouble = files.read_json(place.path / VERDICT)
    found.add_trouble(trouble)
    return data


def _verdict(data: Mapping[str, Any] | None) -> RecordedVerdict | None:
    if data is None or not isinstance(data.get("cause"), str):
        return None
    culprits = tuple(
        Culprit(text(one.get("node")), rank, slot if (slot := whole(one.get("slot"))) is not None else -1)
        for one in items(data.get("culprits"))
        if (rank := whole(one.get("rank"))) is not None
    )
    return RecordedVerdict(
        text(data["cause"]),
        culprits,
        text(data.get("why")),
        text(data.get("action")),
        number(data.get("seen_after_s"), 0.0),
        number(data.get("at_wall"), 0.0),
    )


def _reports(place: EvidenceFolder, found: _Partial) -> None:
    """The newest Report of every node: the judge's, of all nodes, then whatever the nodes have written themselves."""
    if "judged.jsonl" in place.names:
        judged, trouble = files.read_lines(place.path / "judged.jsonl")
        found.add_trouble(trouble)
        for report in items(judged[-1].get("reports")) if judged else []:
            _report(report, found)
    for name in place.names:
        if name.startswith("reports-") and name.endswith(".jsonl"):
            reports, trouble = files.read_lines(place.path / name)
            found.add_trouble(trouble)
            known = {facts.node for facts in found.ranks.values()}
            # What was judged is what counts: a later Report may be of a group that is being killed.
            if reports and text(reports[-1].get("node")) not in known:
                _report(reports[-1], found)


def _report(report: Mapping[str, Any], found: _Partial) -> None:
    node = text(report.get("node"))
    for one in items(report.get("ranks")):
        rank = whole(one.get("rank"))
        if rank is None or not 0 <= rank < MOST_RANKS:
            continue
        found.ranks[rank] = replace(
            found.rank(rank),
            node=node,
            slot=_whole(one.get("slot")),
            phase=text(one.get("phase")),
            step=_whole(one.get("step")),
            collectives=_whole(one.get("collectives")),
            usual=_whole(one.get("usual")),
            barrier=text(one.get("barrier")),
            idle_s=number(one.get("idle_s"), -1.0),
            state=text(one.get("state"))[:1],
            stopped_s=number(one.get("stopped_s"), 0.0),
            cpu_s=number(one.get("cpu_s"), -1.0),
            io_bytes=_whole(one.get("io_bytes")),
            window_s=number(one.get("window_s"), 0.0),
            where=text(one.get("where")),
            function=text(one.get("function")),
            exited=one.get("exited") is True,
        )


def _rank_files(directory: Path, rank: int, found: _Partial) -> None:
    facts, trouble = files.read_json(directory / f"rank-{rank}.json")
    found.add_trouble(trouble)
    log = files.read(directory / f"rank-{rank}.log", _LOG_LIMIT, tail=True)
    found.add_trouble(log.trouble)
    written = files.read(directory / f"rank-{rank}.stacks.txt")
    found.add_trouble(written.trouble)
    parsed = stacks.parse(written.text)
    none = ""
    if parsed is None:
        said = (line for line in written.text.splitlines() if line)
        none = "none were taken" if written.missing else next(said, "empty").removeprefix("no stacks: ")
    facts = facts or {}
    found.taken_at = max(found.taken_at, number(facts.get("at_wall"), 0.0))
    found.why = found.why or text(facts.get("why"))
    found.ranks[rank] = replace(
        _with_facts(found.rank(rank), facts),
        log=tuple(log.text.splitlines()[-LOG_LINES:]),
        stacks=parsed,
        no_stacks=none[:300],
    )


def _with_facts(rank: RankFacts, facts: Mapping[str, Any]) -> RankFacts:
    """What rank-R.json adds; where a Report has said the same, the Report counts: the verdict was made on it."""
    return replace(
        rank,
        node=rank.node or text(facts.get("node")),
        pid=max(0, _whole(facts.get("pid"))),
        phase=rank.phase or text(facts.get("phase")),
        step=rank.step if rank.step >= 0 else _whole(facts.get("step")),
        collectives=rank.collectives if rank.collectives >= 0 else _whole(facts.get("collectives")),
        state=rank.state or text(facts.get("state"))[:1],
        where=rank.where or text(facts.get("where")),
        function=rank.function or text(facts.get("function")),
        wchan=text(facts.get("wchan")),
        call=_call(facts.get("syscall")),
        kernel=tuple(text(line) for line in facts.get("kernel_stack") or () if isinstance(line, str))[:32]
        if isinstance(facts.get("kernel_stack"), list)
        else (),
        children=tuple(
            _child(one) for one in items(facts.get("processes"))[:_MOST_CHILDREN] if one.get("pid") != facts.get("pid")
        ),
    )


def _call(call: object) -> str:
    """ "read of /job/data.bin" """
    if not isinstance(call, dict):
        return ""
    name = text(call.get("name")) or (f"system call {number}" if (number := whole(call.get("number"))) else "")
    target = text(call.get("target"))
    return f"{name} of {target}" if name and target else name


def _child(one: Mapping[str, Any]) -> str:
    """ "pt_data_worker (pid 71) sleeping, in futex_wait_queue" """
    state = wording.STATE_NAMES.get(text(one.get("state"))[:1], "?")
    wchan = text(one.get("wchan"))
    return f"{text(one.get('comm')) or '?'} (pid {whole(one.get('pid'))}) {state}" + (f", in {wchan}" if wchan else "")


def _finished(rank: RankFacts) -> RankFacts:
    holder = None
    if rank.stacks is not None:
        holder = next((thread for thread in rank.stacks.threads if thread.holds_gil), None)
    return replace(rank, remarks=wording.remarks(rank, holder))


def _same(ranks: Sequence[RankFacts]) -> tuple[StackGroup, ...]:
    """Ranks by where their main threads are; the culprits' first, then the smaller crowds: they differ."""
    crowds: dict[object, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        if rank.stacks is not None:
            crowds[rank.stacks.key].append(rank)
    ordered = sorted(crowds.values(), key=lambda crowd: (not any(r.culprit for r in crowd), len(crowd), crowd[0].rank))
    most = max((len(crowd) for crowd in ordered), default=0)
    same = []
    for crowd in ordered:
        assert crowd[0].stacks is not None
        same.append(StackGroup(tuple(rank.rank for rank in crowd), crowd[0].stacks, len(crowd) < most))
    return tuple(same)


def _recorded(place: EvidenceFolder, found: _Partial) -> dict[int, flight.Recording]:
    recorded = {}
    for rank in place.ranks[:MOST_RANKS]:
        name = f"rank-{rank}.flight.json"
        if name in place.names:
            data, trouble = files.read_json(place.path / name, 16 << 20)
            found.add_trouble(trouble)
            one = flight.parse(data) if data is not None else None
            if one is not None:
                recorded[rank] = one
            elif not trouble:
                found.add_trouble(f"{name} holds no flight recording")
    return recorded


def _lines(events: Path | None, found: _Partial) -> list[dict[str, Any]]:
    if events is None:
        return []
    lines, trouble = files.read_lines(events, EVENT_LOG_LIMIT)
    found.add_trouble(trouble)
    return lines


def _asked_for(place: EvidenceFolder, found: _Partial) -> bool:
    return place.is_dump or found.why == wording.DUMP_REASON


def _named(nodes: Sequence[str]) -> str:
    return f": {' or '.join(nodes)}" if 0 < len(nodes) <= _MOST_NODES else ""


def _missing(place: EvidenceFolder, ranks: Sequence[RankFacts]) -> Iterable[str]:
    here = set(place.ranks)
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
    bare = [rank.rank for rank in ranks if rank.rank in here and rank.stacks is None]
    if bare:
        why = sorted({rank.no_stacks for rank in ranks if rank.rank in bare and rank.no_stacks})
        yield f"no stacks of {name_ranks(bare)}" + (f": {'; '.join(why[:3])}" if why else "")


def _next_round(place: EvidenceFolder) -> int:
    assert place.logs is not None
    rounds = [name.removeprefix("round-") for name in files.entry_names(place.logs) if name.startswith("round-")]
    return min((int(n) for n in rounds if n.isdecimal() and len(n) < 10 and int(n) > place.round), default=0)


def _other(place: EvidenceFolder, other: EvidenceFolder) -> str:
    what = "hung" if other.has_verdict else "dumped" if other.is_dump else "suspected"
    return f"round {other.round} ({what}{'' if other.round != place.round else ', ' + other.path.name})"


def items(value: object) -> list[dict[str, Any]]:
    """The objects in a list of them."""
    return [one for one in value[:MOST_RANKS] if isinstance(one, dict)] if isinstance(value, list) else []


def number(value: object, otherwise: float) -> float:
    """The number, if it is one that a clock can show."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if good and isinstance(value, (int, float)) else otherwise


def _whole(value: object) -> int:
    found = whole(value)
    return -1 if found is None or not -1 <= found < 1 << 62 else found

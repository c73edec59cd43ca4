"""Reads a transcript of a hang and writes the answers of the rules: tests/hangs/transcripts/*.txt.

A transcript is written for an operator. Lines that begin with `=>` are answers of the rules; all others are given:
`policy name=value …` and `nodes …` once, then moments, each `--- what happens` (with the word `late` after the time for
evidence), with `NODE name=value … [gathered]` and under it a table of that node's ranks. `-` is an unset column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from elasticd_agent.hangs import verdict as hang
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail, HangReport, LaunchCount, RankReport

WINDOW_S = 2.0
COLUMNS: dict[str, tuple[str, type]] = {
    "rank": ("rank", int),
    "slot": ("slot", int),
    "phase": ("phase", str),
    "step": ("step", int),
    "stepped": ("called_step", bool),
    "issued": ("collectives", int),
    "usual": ("usual", int),
    "barrier": ("barrier", str),
    "within": ("barrier_s", float),
    "timeout": ("timeout_s", float),
    "idle": ("idle_s", float),
    "alive": ("alive_s", float),
    "moved": ("moved_s", float),
    "waiting": ("waiting_s", float),
    "sockets": ("sockets_s", float),
    "call": ("wait_call", str),
    "for": ("wait_rank", int),
    "alone": ("alone", bool),
    "state": ("state", str),
    "stopped": ("stopped_s", float),
    "where": ("where", str),
    "function": ("function", str),
}


@dataclass
class TableMoment:
    """The reports of all nodes at one time."""

    deadline_passed: bool = False
    reports: list[dict[str, Any]] = field(default_factory=list)

    def hang_reports(self) -> list[HangReport]:
        return [HangReport(**{**fields, "ranks": tuple(fields["ranks"])}) for fields in self.reports]


def rerun(text: str) -> str:
    """The same transcript, with today's answers."""
    return "\n".join(_lines(text)) + "\n"


def _lines(text: str) -> Iterator[str]:
    policy, nodes, moment, columns = Policy(), [""], TableMoment(), [""]
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("=>"):
            continue
        words = line.split()
        if not words and moment.reports:
            yield from answers(moment, nodes, policy)
            moment = TableMoment()
        yield line
        if not words or line.startswith("#"):
            continue
        if words[0] == "policy":
            policy = Policy(**{name: float(value) for name, value in _pairs(words[1:])})
        elif words[0] == "nodes":
            nodes = words[1:]
        elif words[0] == "---":
            moment = TableMoment(deadline_passed=any(word.strip(",;:") == "late" for word in words))
        elif line.startswith("  ") and words[0] == "rank":
            columns = words
        elif line.startswith("  "):
            moment.reports[-1]["ranks"].append(_rank(columns, words))
        else:
            numbers = {f"{name}_s": float(value) for name, value in _pairs(words[1:]) if name != "store"}
            state = dict(_pairs(words[1:])).get("store", "")
            gathered = "gathered" in words
            moment.reports.append(
                {"round": 1, "node": words[0], "ranks": [], "gathered": gathered, "store_state": state, **numbers}
            )
    if moment.reports:
        yield from answers(moment, nodes, policy)


def answers(moment: TableMoment, nodes: list[str], policy: Policy) -> Iterator[str]:
    """Every node's suspicion, and the judgement on all reports."""
    reports = moment.hang_reports()
    for report in reports:
        why = hang.reason_to_suspect(report, policy)
        yield f"=> {report.node}: {f'suspects: {why}' if why else 'suspects nothing'}"
    match hang.judge(reports, nodes, policy, deadline_passed=moment.deadline_passed):
        case hang.NoHang(why):
            yield f"=> healthy: {why}"
        case hang.SuspectedHang(why):
            yield f"=> wait: {why}"
        case hang.Hang(culprits, cause, why, kills_group=ends):
            blamed = ", ".join(f"rank {at.rank} (slot {at.slot} of {at.node})" for at in culprits) or "nobody"
            yield f"=> {'HUNG' if ends else 'report'}, {cause}; to blame: {blamed}"
            yield f"=> {why}"


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in words) if value]


def _rank(columns: list[str], words: list[str]) -> RankReport:
    """The last column takes the rest of the line; `cores` and `MB/s` are what it uses over a window of two seconds;
    `pending` is the unfinished collective in its flight recorder, 0 for none."""
    values = [*words[: len(columns) - 1], " ".join(words[len(columns) - 1 :])]
    fields: dict[str, Any] = {}
    for name, value in zip(columns, values, strict=True):
        if value in ("-", ""):
            continue
        if name == "cores":
            fields |= {"cpu_s": float(value) * WINDOW_S, "window_s": WINDOW_S}
        elif name == "MB/s":
            fields |= {"io_bytes": int(float(value) * WINDOW_S * 1e6), "window_s": WINDOW_S}
        elif name == "pending":
            last = max(fields["collectives"], 0)
            fields["groups"] = (GroupTail(DEFAULT_GROUP_NAME, last, int(value), backend="gloo", in_job=True),)
        elif name == "launched":  # 41/42, by NCCL's RAS; "," between communicators
            counts = [tuple(map(int, one.split("/"))) for one in value.split(",")]
            fields["launches"] = tuple(LaunchCount(f"c{at}", "AllReduce", *both) for at, both in enumerate(counts))
        elif name == "code":
            fields["exited"] = True
        else:
            field_name, of = COLUMNS[name]
            fields[field_name] = of(value)
    return RankReport(**{"slot": fields["rank"], "stack": fields.get("function", ""), "evidence": True, **fields})

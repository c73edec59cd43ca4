"""Pure: Explanation -> one page of plain text for a person on call: first what happened, then how that is known.

The page is read at night by a person who has not seen the job before. So the first sentence is the verdict, the facts
follow with their times, then one row for each rank (or for each group of ranks that do the same), then the evidence:
waits, stacks, flight recorder, GPUs, the last lines of the ranks to blame. What could not be collected stands in a
section of its own. A missing file is a fact, too, and an empty section would look like a clean one.

Rules of the page
- A thousand ranks fit on it. Ranks that do the same share a row, a stack and a sentence, and lists are cut with the
  number of what was left out.
- The rank to blame comes first everywhere and is marked by ">".
- Frames of libraries are folded, frames of the script are shown: the reader can change only the latter.
- Control characters in text from workers (names, log lines) are made visible, as a log line must not move the cursor of
  the terminal that shows it.
"""

from __future__ import annotations

import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticd_agent.hangs.causes import ADVICE
from elasticd_agent.hangs.explain.flight import GroupComparison
from elasticd_agent.hangs.explain.model import Aftermath, Explanation, RankFacts, StackGroup, describe_ranks
from elasticd_agent.hangs.explain.phrases import STATE_NAMES
from elasticd_agent.hangs.stacks import Frame, ThreadStack, script_library
from elasticd_agent.model.phrases import count, has_have, visible

DEFAULT_WIDTH = 110
MAX_SUMMARY_LINES = 12
NEWER_EVIDENCE_S = 60.0
"""Evidence that is this much newer than the verdict is of the same wait, which lasts, or of another one: a hang that
was only reported ends no round. Nodes' clocks may differ by as much."""
MAX_ROWS = 16
"""More ranks share rows where they do the same."""
_LOG_LINES_SHOWN = 8
_MAX_STACKS = 8
_GPU_FACTS = (
    ("utilization_percent", "busy", " %"),
    ("memory_used_bytes", "memory", " B"),
    ("temperature_c", "at", " °C"),
    ("power_w", "drawing", " W"),
    ("throttle_reasons", "throttled by", ""),
)
_INDENT = 11


def page(explained: Explanation, width: int = DEFAULT_WIDTH) -> str:
    """The whole page, with its last newline."""
    culprits = [rank for rank in explained.blamed_ranks if rank.log]
    parts = [
        _wrap(_capital(explained.headline) + ".", width),
        _summary_rows(explained, width),
        _section("RANKS", _table(explained, width)),
        _section("WAITS", [f"  {_capital(sentence)}." for sentence in explained.wait_sentences]),
        _section("WHAT THE PROCESSES WERE DOING", _remarks(explained, width)),
        _section("STACKS  innermost call first; > is the script's own", _stacks(explained)),
        _section("FLIGHT RECORDER", _flight_recorders(explained, width)),
        _section("GPUS", _gpus(explained, width)),
        *[_section(f"LAST LINES OF RANK {rank.rank}", _last_log_lines(rank, width)) for rank in culprits[:3]],
        _section("NOT HERE", [line for trouble in explained.troubles for line in _wrap(trouble, width, "  ")]),
        _other_folders(explained, width),
    ]
    return "\n\n".join("\n".join(visible(line, "\t\n") for line in part) for part in parts if part) + "\n"


def summary(explained: Explanation, width: int = DEFAULT_WIDTH) -> list[str]:
    """The page in at most MAX_SUMMARY_LINES lines, for the end of a job after a hang."""
    lines = _wrap(_capital(explained.headline) + ".", width)[:3]
    lines += [f"  {_capital(sentence)}." for sentence in explained.wait_sentences[:3]]
    culprits = {rank.rank for rank in explained.blamed_ranks}
    for group in explained.stack_groups:
        if culprits.intersection(group.ranks):
            frames = [shown for shown in fold_frames(group.main_thread) if isinstance(shown, Frame)]
            lines += [f"  {describe_ranks(group.ranks)}: {_frame(frame)}" for frame in frames[:2]]
            break
    for rank in explained.blamed_ranks[:1]:
        lines += [f"  rank {rank.rank}'s last line: {line.strip()}" for line in rank.log[-1:] if line.strip()]
    more = f"  everything else: elasticd explain {explained.directory}"
    return [visible(line, "\t\n")[: 2 * width] for line in [*lines[: MAX_SUMMARY_LINES - 1], more]]


def _summary_rows(explained: Explanation, width: int) -> list[str]:
    """The rows of what happened: cause, times, what was done, the job, and where the evidence lies."""
    verdict, rows = explained.verdict, []
    if verdict is not None:
        rows.append(("cause", verdict.cause + (f": {ADVICE[verdict.cause]}" if verdict.cause in ADVICE else "")))
        if verdict.at_wall:
            began = _format_time(verdict.at_wall - verdict.seen_after_s)
            rows += [
                ("but", other_wait)
                for comparison in explained.group_comparisons
                if (other_wait := _wait_in_other_group(comparison, explained))
            ]
            rows.append(("when", f"stuck since {began}; found hung after {verdict.seen_after_s:.1f} s"))
            if explained.taken_at > verdict.at_wall + NEWER_EVIDENCE_S:
                rows.append(("but", f"the stacks are of a later moment, {_format_time(explained.taken_at)}"))
    if explained.kind == "hang":
        rows.append(("done", _describe_action(explained)))
    elif explained.taken_at:
        rows.append(("when", f"taken at {_format_time(explained.taken_at)}"))
    if explained.kind == "suspicion":
        rows.append(("done", _describe_action_unjudged(explained.aftermath)))
    if explained.job:
        rows.append(("job", explained.job))
    rows.append(("evidence", explained.directory))
    lines = []
    for name, value in rows:
        lines += _wrap(value, width, f"{name:<{_INDENT - 1}} ", " " * _INDENT)
    return lines


def _wait_in_other_group(one: GroupComparison, explained: Explanation) -> str:
    """Collectives are counted in the default group only: a culprit may wait for a rank in another group."""
    waits = [rank.rank for rank in explained.blamed_ranks if rank.rank in one.pending]
    if one.waiting_for is None or not waits or any(rank.rank in one.missing for rank in explained.blamed_ranks):
        return ""
    lacks, have = describe_ranks(one.missing), has_have(one.missing)
    wait = f"{describe_ranks(waits)} {'waits' if len(waits) == 1 else 'wait'} in {one.group} for {lacks}"
    return f"{wait}, which {have} not issued {one.waiting_for} there: look at {lacks} first"


def _describe_action_unjudged(followed: Aftermath) -> str:
    """The consequence of a suspicion: it may have passed, or its verdict is elsewhere; only an event log knows what
    followed."""
    if followed.reason:
        return f"no verdict is here; round {followed.round} followed: {followed.reason}"
    if followed.ended:
        return f"no verdict is here; the job has {followed.ended}"
    if followed.logged and not followed.round:
        return "nothing so far, by the event log"
    known = f"why round {followed.round} followed" if followed.round else "whether the group was killed"
    return f"{known} is not known here: neither a verdict nor an event log is (--event-log FILE)"


def _describe_action(explained: Explanation) -> str:
    """Say what was done about the hang, and what followed, as far as the event log knows it."""
    verdict, followed = explained.verdict, explained.aftermath
    if verdict is not None and verdict.action == "report":
        done = "only reported: no process was killed"
        return f"{done}; round {followed.round} followed later" if followed.round else done
    kept = f", except {count(followed.kept, 'worker')} here, which kept the process" if followed.kept else ""
    parts = [f"the workers were killed (SIGKILL){kept}"]
    if followed.survivors:
        parts.append(f"processes {', '.join(map(str, followed.survivors))} survived SIGKILL")
    if followed.round:
        parts.append(_describe_next_round(followed, max((rank.step for rank in explained.ranks), default=0)))
    elif followed.ended:
        parts.append(f"the job has {followed.ended}")
    else:
        parts.append("what followed is not known here (see --event-log FILE)")
    return "; ".join(parts)


def _describe_next_round(followed: Aftermath, reached: int) -> str:
    """Say which round followed, with what world size, from which state and after how long."""
    text = f"round {followed.round} followed"
    if followed.world_size:
        workers = count(followed.world_size, "worker")
        text += f" with {workers} on {', '.join(followed.nodes[:8])}"
    if followed.resumed is not None:
        text += f", from step {followed.resumed[1]} of round {followed.resumed[0]}"
        text += f", saved by rank {followed.donor} after the fault" if followed.donor is not None else ""
        again = reached - followed.resumed[1]
        text += f" ({count(again, 'step')} to train again)" if again > 0 else ""
    if followed.recovery_s is not None:
        text += f"; it trained {followed.recovery_s:.1f} s after the fault"
    return text


# --- the table --------------------------------------------------------------------------------------------------------

_COLUMNS = ("", "rank", "node", "slot", "phase", "step", "issued", "idle", "state", "where it was")
_RIGHT_ALIGNED = (1, 3, 5, 6, 7)


def _table(explained: Explanation, width: int) -> list[str]:
    """The table of ranks: a row each, or shared rows beyond MAX_ROWS."""
    ranks = explained.ranks
    rows = [_row([rank]) for rank in ranks] if len(ranks) <= MAX_ROWS else _shared_rows(ranks)
    if not rows:
        return []
    cells = [_COLUMNS, *rows]
    # A dump has no slots.
    shown = [i for i, name in enumerate(_COLUMNS) if name != "slot" or any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in cells) for i in shown}
    return [_align(row, widths)[: max(width, 60) + 40].rstrip() for row in cells]


def _shared_rows(ranks: Sequence[RankFacts]) -> list[tuple[str, ...]]:
    """Rows of ranks that do the same; the rank to blame first, then small groups, since the
    exception is what matters.
    """
    groups: dict[tuple[object, ...], list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        blamed = (rank.rank if rank.culprit else -1,)
        alike = rank.phase, rank.step, rank.collectives, rank.state, rank.where, rank.function, rank.exited
        groups[blamed + alike].append(rank)
    ordered = sorted(groups.values(), key=lambda group: (not group[0].culprit, len(group), group[0].rank))
    return [_row(group) for group in ordered]


def _row(group: Sequence[RankFacts]) -> tuple[str, ...]:
    """The cells of one row. Values that are unknown are "?", never a guess."""
    first = group[0]
    nodes = sorted({rank.node for rank in group if rank.node})
    state = STATE_NAMES.get(first.state, first.state) + (
        f" {first.stopped_s:.1f} s" if first.state == "T" and first.stopped_s else ""
    )
    idle = [rank.idle_s for rank in group if rank.idle_s >= 0]
    return (
        ">" if first.culprit else "",
        describe_ranks([rank.rank for rank in group]).partition(" ")[2],
        nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else "?",
        str(first.slot) if len(group) == 1 and first.slot >= 0 else "",
        first.phase or "?",
        str(first.step) if first.step >= 0 else "?",
        str(first.collectives) if first.collectives >= 0 else "–",
        f"{max(idle):.1f} s" if idle else "?",
        "ended, 0" if first.exited else state or "?",
        _describe_place(first),
    )


def _describe_place(rank: RankFacts) -> str:
    """ "all_reduce (train.py:44)"; where that is a library's, the script's own call that led there, too."""
    main = rank.main_thread
    own = main.script_frame if main is not None else None
    inner = next(iter(main.frames), None) if main is not None else None
    text = rank.function or (f"{inner.function} ({inner.path_and_line})" if inner is not None else rank.barrier or "?")
    if own is not None and own.basename_and_line not in text:
        text += f" from {own.function} ({own.path_and_line})"
    if rank.where not in ("collective", "device", "init", "barrier"):
        return text
    return f"{rank.where}: {text}" if text != "?" else rank.where


def _align(row: Sequence[str], widths: Mapping[int, int]) -> str:
    return " " + "  ".join(
        row[i].rjust(size) if i in _RIGHT_ALIGNED else row[i].ljust(size) for i, size in widths.items()
    )


# --- the rest ---------------------------------------------------------------------------------------------------------


def _remarks(explained: Explanation, width: int) -> list[str]:
    """A sentence that several ranks share stands once."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(explained.ranks, key=lambda rank: (not rank.culprit, rank.rank)):
        for remark in rank.remarks:
            ranks[remark].append(rank.rank)
    return [
        line
        for remark, group in ranks.items()
        for line in _wrap(f"{describe_ranks(group)}: {remark}", width, "  ", "    ")
    ]


def _stacks(explained: Explanation) -> list[str]:
    """The stacks by group: ranks with the same stack stand together."""
    culprits = {rank.rank for rank in explained.blamed_ranks}
    groups = explained.stack_groups
    lines: list[str] = []
    for group in groups[:_MAX_STACKS]:
        blamed = bool(culprits.intersection(group.ranks))
        differs = " differs" if group.is_minority and len(groups) > 1 else ""
        alike = differs if len(group.ranks) == 1 else " are identical"
        lines.append(f"{'>' if blamed else ' '} {describe_ranks(group.ranks)}{alike} ({group.first_rank.source})")
        lines += _threads(group, blamed)
    if len(groups) > _MAX_STACKS:
        left = [rank for group in groups[_MAX_STACKS:] for rank in group.ranks]
        lines.append(f"  {describe_ranks(left)}: {len(groups) - _MAX_STACKS} more stacks, see the files")
    return lines


def _threads(group: StackGroup, blamed: bool) -> list[str]:
    """The threads to show: the main one is enough of a rank that only waits; another thread of a culprit may hold what
    that one waits for."""
    shown, processes = [("main thread", group.main_thread)], group.first_rank.processes
    script = script_library(group.main_thread.frames)
    for process in processes if blamed else ():
        below = "" if process is processes[0] else f" of {process}"
        others = (thread for thread in process.threads if thread is not group.main_thread)
        own = [thread for thread in others if any(frame.library == script for frame in thread.frames)]
        shown += [(f"thread {thread.label}{below}", thread) for thread in own]
    lines = [line for name, thread in shown[:6] for line in _thread(name, thread, alone=len(shown) == 1)]
    hidden = len(group.first_rank.threads) - len(shown[:6])
    return [*lines, f"      and {count(hidden, 'other thread')}"] if hidden else lines


def _thread(name: str, thread: ThreadStack, alone: bool) -> list[str]:
    """A thread's frames, innermost first, with runs of library frames folded into a line."""
    state = f" ({thread.state})" if thread.state not in ("", "idle") else ""
    lines, script = [f"    {name}{state}"] if state or not alone else [], script_library(thread.frames)
    for shown in fold_frames(thread):
        if isinstance(shown, FoldedFrames):
            libraries = ", ".join(shown.libraries[:4])
            lines.append(f"        … {count(shown.count, 'frame')} of {libraries}")
        else:
            lines.append(f"      {'>' if shown.library == script else ' '} {_frame(shown)}")
    return lines if thread.frames else [*lines, "        no Python frames"]


def _frame(frame: Frame) -> str:
    return f"{frame.function}  {frame.path_and_line}"


def _flight_recorders(explained: Explanation, width: int) -> list[str]:
    """The sentences of the flight recorder for each process group, and the ranks without a recording."""
    lines = [line for comparison in explained.group_comparisons for line in _group_lines(comparison, explained, width)]
    have = {rank for comparison in explained.group_comparisons for rank in comparison.last}
    silent = [rank.rank for rank in explained.ranks if rank.rank not in have and not rank.exited]
    # A rank that is stopped, or holds the GIL, cannot write its recording.
    return [*lines, f"  no recording of {describe_ranks(silent)}"] if lines and silent else lines


def _group_lines(one: GroupComparison, explained: Explanation, width: int) -> list[str]:
    if explained.kind != "dump":
        return _comparison_lines(one, width)
    # Ranks that train are read one after the other: a difference of one collective says nothing.
    last = [issued for issued in one.last.values() if issued is not None]
    newest = max(last, key=lambda issued: issued.number, default=None)
    return [f"  {one.group}: last issued {newest}"] if newest is not None else []


def _comparison_lines(one: GroupComparison, width: int) -> list[str]:
    """The sentences for one process group: different collectives, missing ranks, or the common last one."""
    lines = []
    if one.differing is not None:
        issued = "; ".join(f"{describe_ranks(ranks)} issued {what}" for what, ranks in one.differing.items())
        lines += _wrap(f"{one.group}: the ranks issued different collectives: {issued}", width, "  ", "    ")
    if one.missing and one.waiting_for is not None:
        others = [rank for rank in one.last if rank not in one.missing]
        behind = f"{describe_ranks(one.missing)} {has_have(one.missing)} not issued {one.waiting_for}"
        ahead = f"{describe_ranks(others)} {has_have(others)}"
        lines += _wrap(f"{one.group}: {behind}, which {ahead}", width, "  ", "    ")
    issued_last = {str(issued) for issued in one.last.values()}
    if not lines and len(issued_last) == 1 and not one.pending:
        lines.append(f"  {one.group}: all issued the same, last {issued_last.pop()}")
    elif not lines:
        lines.append(f"  {one.group}, by {describe_ranks(list(one.last))}:")
    unfinished: dict[str, list[int]] = defaultdict(list)
    for rank, collective in one.pending.items():
        unfinished[str(collective)].append(rank)
    return [*lines, *(f"    not finished: {what}, on {describe_ranks(ranks)}" for what, ranks in unfinished.items())]


def _gpus(explained: Explanation, width: int) -> list[str]:
    """The faulty ones with their faults; of the others the utilisation, which tells a hang from work."""
    lines = []
    for gpu in explained.gpus[:MAX_ROWS]:
        facts = dict(gpu.facts)
        words = [gpu.trouble] if gpu.trouble else []
        words += [f"{label} {facts[name]}{unit}" for name, label, unit in _GPU_FACTS if name in facts]
        lines += _wrap(
            f"{gpu.name}: {', '.join(words) or 'nothing is known'}", width, "> " if gpu.trouble else "  ", "    "
        )
    if len(explained.gpus) > MAX_ROWS:
        lines.append(f"  and {len(explained.gpus) - MAX_ROWS} more, see --json")
    return lines


def _last_log_lines(rank: RankFacts, width: int) -> list[str]:
    return [f"  {line.expandtabs(4)[: 2 * width]}" for line in rank.log[-_LOG_LINES_SHOWN:]]


def _other_folders(explained: Explanation, width: int) -> list[str]:
    if not explained.other_folders:
        return []
    others = ", ".join(explained.other_folders[-12:])
    return _wrap(f"There is evidence of other rounds, too: {others}. --round N shows one, --list all.", width)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    body = list(lines)
    return [title, *body] if body else []


def _wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        max(width, 40),
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")


def _format_time(wall: float) -> str:
    return _strftime("%Y-%m-%d %H:%M:%S %Z", wall)


def _strftime(form: str, wall: float) -> str:
    """A time outside of any calendar is shown as a number."""
    try:
        return time.strftime(form, time.localtime(wall))
    except (OverflowError, ValueError, OSError):
        return f"{wall:g}"


@dataclass(frozen=True, slots=True)
class FoldedFrames:
    """Library frames between or below those that matter."""

    count: int
    libraries: tuple[str, ...]


def fold_frames(thread: ThreadStack, most: int = 12) -> list[Frame | FoldedFrames]:
    """The frames to show of the thread: its innermost call, the script's own calls, and of libraries only how many."""
    shown: list[Frame | FoldedFrames] = []
    hidden: list[Frame] = []
    left, script = most, script_library(thread.frames)
    for index, frame in enumerate(thread.frames):
        if index == 0 or (frame.library == script and left > 0):
            # A single frame takes no more room than the line that says there is one.
            shown += hidden if len(hidden) < 2 else [_fold_run(hidden)]
            shown.append(frame)
            hidden, left = [], left - 1
        else:
            hidden.append(frame)
    return [*shown, _fold_run(hidden)] if hidden else shown


def _fold_run(frames: Sequence[Frame]) -> FoldedFrames:
    return FoldedFrames(len(frames), tuple(dict.fromkeys(frame.library or "the script" for frame in frames)))

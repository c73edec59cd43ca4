"""Pure: facts -> sentences of the page: which rank is at fault, which ranks waited where, what /proc means.

Where a verdict exists no other one is added, and where there is none a guess is worded as a guess.

The sentences of the page are made here and nowhere else, so the same fact has the same words in the headline, in the
list of waits and in the table. A place in the kernel is translated by the beginnings of function names, which are
stable between kernels where the names themselves are not; a name that is not known is shown as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from elasticd_agent.hangs.explain.model import ExplanationKind, RankFacts, describe_ranks
from elasticd_agent.model.phrases import count, is_are
from elasticd_agent.model.reports import RecordedVerdict

STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked",
    "T": "STOPPED",
    "t": "traced",
    "Z": "ZOMBIE",
    "X": "ending",
    "I": "idle",
}
_ODD_STATES = (("T", "stopped"), ("Z", "a zombie"))
_WAIT_PHRASES = {
    "collective": "wait in a collective",
    "device": "wait for the device",
    "init": "wait for the process group to be made",
    "barrier": "wait at a barrier",
}
_KERNEL_WAITS = (
    # The particular ones come first: below them in a kernel stack there is always a general one.
    (("pipe_", "fifo_", "wait_for_partner", "anon_pipe"), "a pipe or FIFO: its other end is closed or idle"),
    (("nfs", "rpc_"), "an NFS server"),
    (("fuse_", "request_wait_answer"), "a FUSE file system"),
    (("ceph_", "ll_", "ptlrpc_", "gpfs", "cifs_", "p9_"), "a network file system"),
    (("uvm_", "nvidia", "nv0", "os_acquire"), "the NVIDIA driver"),
    (("ptrace_stop",), "a debugger"),
    (("io_schedule", "folio_wait", "wait_on_page", "jbd2", "ext4_", "xfs_", "blk_", "balance_dirty"), "a disk"),
    (("do_wait", "kernel_wait4"), "a child process to end"),
    (("futex",), "a lock or another thread"),
    (("unix_stream", "sk_wait", "inet_csk_accept", "tcp_recvmsg", "skb_wait"), "a socket"),
    (("ep_poll", "do_poll", "do_sys_poll", "do_select", "poll_schedule"), "any of several files or sockets"),
    (("hrtimer_nanosleep", "do_nanosleep", "clock_nanosleep"), "time to pass: it sleeps"),
)
"""Kernel functions, by how their names begin -> what a process in one of them waits for."""
_USUAL_KERNEL_WAITS = tuple(what for _, what in _KERNEL_WAITS[-4:])
"""The usual waits of a rank that waits for others: not worth a remark."""
_BUSY_CPU_PERCENT = 10.0
"""Per cent of a CPU: a rank that uses more counts as working in the verdict's rules."""


def headline(
    number: int, kind: ExplanationKind, verdict: RecordedVerdict | None, ranks: Sequence[RankFacts], reason: str
) -> str:
    """The outcome in one sentence. `reason`: another node's verdict, or else why there was a suspicion."""
    which = f"round {number}" if number else "the group"
    if verdict is not None:
        hung = "may have hung" if verdict.action == "report" else "hung"
        return f"{which} {hung}, and {_describe_culprits(verdict)}: {verdict.why or 'no reason is given'}"
    if kind == "dump":
        return f"{which}: {_dump_headline(ranks)}"
    if kind == "hang":
        return f"{which} hung: {reason}"
    because = f" ({reason})" if reason else ""
    return f"{which} was suspected of hanging{because}, and no verdict is here: {_guess_culprits(ranks)}"


def _dump_headline(ranks: Sequence[RankFacts]) -> str:
    """The headline of a dump: what is odd, or where the ranks were."""
    for state, words in _ODD_STATES:
        odd = [rank.rank for rank in ranks if rank.state == state]
        if odd:
            return f"no verdict was requested, but {describe_ranks(odd)} {is_are(odd)} {words}"
    steps = sorted({rank.step for rank in ranks if rank.step >= 0})
    at = "" if not steps else f" at step {steps[0]}" if len(steps) == 1 else f" at steps {steps[0]} to {steps[-1]}"
    return f"a dump of a running group: what {count(len(ranks), 'rank')} did{at}"


def _describe_culprits(verdict: RecordedVerdict) -> str:
    """Say which ranks the verdict blames, and on which nodes."""
    culprits = verdict.culprits
    if not culprits:
        return "no single rank is at fault"
    where = sorted({culprit.node for culprit in culprits})
    on = f" on {', '.join(where[:8])}" if not all(f" on {node} " in verdict.why for node in where) else ""
    return f"{describe_ranks([culprit.rank for culprit in culprits])}{on} {is_are(culprits)} at fault"


def _guess_culprits(ranks: Sequence[RankFacts]) -> str:
    """The ranks that differ, by facts alone."""
    alive = [rank for rank in ranks if not rank.exited]
    for state, words in _ODD_STATES:
        odd = [rank.rank for rank in alive if rank.state == state]
        if odd:
            return f"{describe_ranks(odd)} {is_are(odd)} {words}"
    counts = {rank.rank: (rank.step, rank.collectives) for rank in alive if rank.step >= 0}
    least = min(counts.values(), default=(0, 0))
    behind = [rank for rank, at in counts.items() if at == least]
    if len(behind) < len(counts):
        return f"{describe_ranks(behind)} {is_are(behind)} behind the others"
    outside = [rank.rank for rank in alive if rank.where == "elsewhere"]
    if outside and any(rank.where in _WAIT_PHRASES for rank in alive):
        return f"{describe_ranks(outside)} {is_are(outside)} not where the others wait"
    return "no rank stands out"


def describe_waits(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    """Which ranks waited where, one sentence for each place, the largest group first."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in ranks:
        if rank.exited:
            groups["exited", "", ""].append(rank.rank)
        elif rank.state in ("T", "Z"):
            groups[rank.state, "", ""].append(rank.rank)
        elif rank.where:
            groups[rank.where, rank.function, rank.barrier].append(rank.rank)
    ordered = sorted(groups.items(), key=lambda one: (-len(one[1]), one[1]))
    return tuple(f"{describe_ranks(group)} {_describe_wait(place, group)}" for place, group in ordered)


def _describe_wait(place: tuple[str, str, str], group: Sequence[int]) -> str:
    """Say where a group of ranks waits, after the names of the ranks."""
    where, function, barrier = place
    if where == "exited":
        return "had exited with code 0"
    if where == "T":
        return f"{is_are(group)} stopped"
    if where == "Z":
        return "is a zombie" if len(group) == 1 else "are zombies"
    if where not in _WAIT_PHRASES:
        return f"{is_are(group)} outside any collective" + (f", in {function}" if function else "")
    verb = _WAIT_PHRASES[where] if len(group) > 1 else _WAIT_PHRASES[where].replace("wait", "waits", 1)
    at = f" {barrier!r}" if where == "barrier" and barrier else ""
    return f"{verb}{at}" + (f" ({function})" if function else "")


def remarks(rank: RankFacts) -> tuple[str, ...]:
    """The facts of one rank that a person needs to know."""
    since = f" for {rank.stopped_s:.1f} s" if rank.stopped_s else ""
    state = {
        "T": f"stopped{since} by a signal: it does nothing before SIGCONT",
        "t": "traced: a debugger is attached",
        "Z": "a zombie: its main thread has ended, the process cannot be reaped yet",
        "D": "blocked in the kernel (state D): SIGKILL may not end it before that is over",
    }.get(rank.state, "")
    kernel = "" if rank.state in ("T", "t", "Z") else _kernel_wait(rank)
    children = f"processes below it: {'; '.join(rank.children[:8])}" if rank.culprit and rank.children else ""
    return tuple(remark for remark in (state, kernel, _gil_holder(rank), children, _usage(rank)) if remark)


def _gil_holder(rank: RankFacts) -> str:
    """A main thread that runs usually has the GIL; one that has it and sleeps keeps it from all others."""
    holder = next((thread for thread in rank.threads if thread.holds_gil), None)
    if holder is None:
        return ""
    if holder is rank.main_thread and not (rank.culprit and rank.state in ("S", "D")):
        return ""
    own = holder.script_frame or next(iter(holder.frames), None)
    return f"thread {holder.label!r} holds Python's lock (GIL)" + (
        f", in {own.function} ({own.path_and_line})" if own else ""
    )


def _usage(rank: RankFacts) -> str:
    """The CPU and I/O that the processes used; for a rank that waits and is not blamed, only if that is more than a
    little."""
    if rank.window_s <= 0 or rank.cpu_s < 0:
        return ""
    share = 100 * rank.cpu_s / rank.window_s
    if not rank.culprit and share < _BUSY_CPU_PERCENT:
        return ""
    moved = f", {_format_bytes(rank.io_bytes)} read and written" if rank.io_bytes > 0 else ", no I/O"
    return f"used {share:.0f} % of a CPU over {rank.window_s:.1f} s, children included{moved}"


def _kernel_wait(rank: RankFacts) -> str:
    """The place of the main thread in the kernel, if that is unusual or the rank is blamed."""
    what = kernel_wait_target([rank.wchan, *rank.kernel])
    at = ", ".join(part for part in (rank.call, rank.wchan) if part)
    remarkable = rank.culprit or rank.state == "D"
    if what and (remarkable or what not in _USUAL_KERNEL_WAITS):
        return f"in the kernel, waiting for {what}" + (f" ({at})" if at else "")
    return f"in the kernel ({at})" if at and remarkable else ""


def kernel_wait_target(functions: Sequence[str]) -> str:
    """The thing that a process in these kernel functions waits for, "" if that is not known."""
    # A kernel stack's line is "[<0>] nfs_wait_on_request+0x4c/0x70 [nfs]".
    names = [function.removeprefix("[<0>] ").lstrip("_") for function in functions]
    return next((what for starts, what in _KERNEL_WAITS if any(name.startswith(starts) for name in names)), "")


def _format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

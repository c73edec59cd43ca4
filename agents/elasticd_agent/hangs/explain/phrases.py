"""Facts -> sentences: who is at fault, who waited where, and what /proc says in words a tired person understands.

It exists so that every sentence of the page is made in one place. It adds no verdict where there is one, and says that
it only guesses where there is none. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from elasticd_agent.hangs.explain.model import EvidenceKind, RankFacts, RecordedVerdict, name_ranks
from elasticd_agent.hangs.explain.stacks import ShownThread
from elasticd_agent.model.phrases import count, is_are

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
_WAITS = {
    "collective": "wait in a collective",
    "device": "wait for the device",
    "init": "wait for the process group to be made",
    "barrier": "wait at a barrier",
}
_KERNEL = (
    # What is particular comes first: below it in a kernel stack there is always something general.
    (
        ("pipe_", "fifo_", "wait_for_partner", "anon_pipe"),
        "a pipe or FIFO: nobody is at its other end, or does nothing",
    ),
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
    (("hrtimer_nanosleep", "do_nanosleep", "clock_nanosleep"), "nothing but time: it sleeps"),
)
"""Kernel functions, by how their names begin -> what whoever is in one waits for."""
_USUAL = tuple(what for _, what in _KERNEL[-4:])
"""What a rank that only waits for others waits for, as a rule: no news."""
DUMP_REASON = "asked for by elasticd dump"
"""What detector.py says of evidence that nobody's suspicion is the reason for."""
_BUSY = 10.0
"""Per cent of a CPU: hang's rules take a rank that uses more for one that works."""


def headline(
    number: int, kind: EvidenceKind, verdict: RecordedVerdict | None, ranks: Sequence[RankFacts], reason: str
) -> str:
    """What happened, in one sentence. `reason`: what another node's verdict was, or else why there was suspicion."""
    which = f"round {number}" if number else "the group"
    if verdict is not None:
        return f"{which} hung, and {_blamed(verdict)}: {verdict.why or 'no reason is given'}"
    if kind == "dump":
        stopped = [rank.rank for rank in ranks if rank.state in ("T", "Z")]
        if stopped:
            state = _state(ranks, stopped[0])
            return f"{which}: nobody has been judged, but {name_ranks(stopped)} {is_are(stopped)} {state}"
        steps = sorted({rank.step for rank in ranks if rank.step >= 0})
        at = "" if not steps else f" at step {steps[0]}" if len(steps) == 1 else f" at steps {steps[0]} to {steps[-1]}"
        return f"{which}: nobody is at fault: this is what {count(len(ranks), 'rank')} did{at} when somebody asked"
    if kind == "hang":
        return f"{which} hung: {reason}"
    because = f" ({reason})" if reason else ""
    return f"{which} was suspected of hanging{because}, and no verdict is here: {_guess(ranks)}"


def _blamed(verdict: RecordedVerdict) -> str:
    culprits = verdict.culprits
    if not culprits:
        return "no single rank is at fault"
    where = sorted({culprit.node for culprit in culprits})
    on = f" on {', '.join(where[:8])}" if not all(f" on {node} " in verdict.why for node in where) else ""
    return f"{name_ranks([culprit.rank for culprit in culprits])}{on} {is_are(culprits)} at fault"


def _guess(ranks: Sequence[RankFacts]) -> str:
    """Who looks different, by facts alone; worded as no more than that."""
    alive = [rank for rank in ranks if not rank.exited]
    for states, what in (("T", "stopped"), ("Z", "a zombie")):
        odd = [rank.rank for rank in alive if rank.state in states]
        if odd:
            return f"{name_ranks(odd)} {is_are(odd)} {what}"
    places = [(rank.step, rank.collectives) for rank in alive if rank.step >= 0]
    if places and min(places) < max(places):
        odd = [rank.rank for rank in alive if (rank.step, rank.collectives) == min(places)]
        return f"{name_ranks(odd)} {is_are(odd)} behind the others"
    inside = [rank for rank in alive if rank.where in _WAITS]
    outside = [rank.rank for rank in alive if rank.where == "elsewhere"]
    if inside and outside:
        return f"{name_ranks(outside)} {is_are(outside)} not where the others wait"
    return "the facts single nobody out"


def describe_waits(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    """Who waited where, one sentence for each place, the largest crowd first."""
    crowds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in ranks:
        if rank.exited:
            crowds["exited", "", ""].append(rank.rank)
        elif rank.state in ("T", "Z"):
            crowds[rank.state, "", ""].append(rank.rank)
        elif rank.where:
            crowds[rank.where, rank.function, rank.barrier].append(rank.rank)
    sentences = []
    for (where, function, barrier), who in sorted(crowds.items(), key=lambda one: (-len(one[1]), one[1])):
        if where == "exited":
            sentences.append(f"{name_ranks(who)} had ended with code 0")
        elif where in ("T", "Z"):
            zombie = "a zombie" if len(who) == 1 else "zombies"
            sentences.append(f"{name_ranks(who)} {is_are(who)} {'stopped' if where == 'T' else zombie}")
        elif where in _WAITS:
            verb = _WAITS[where] if len(who) > 1 else _WAITS[where].replace("wait", "waits", 1)
            at = f" {barrier!r}" if where == "barrier" and barrier else ""
            sentences.append(f"{name_ranks(who)} {verb}{at}" + (f" ({function})" if function else ""))
        else:
            inside = f", in {function}" if function else ""
            sentences.append(f"{name_ranks(who)} {is_are(who)} outside any collective{inside}")
    return tuple(sentences)


def remarks(rank: RankFacts, holder: ShownThread | None) -> tuple[str, ...]:
    """What of one rank's /proc facts a person needs to know."""
    said = []
    if rank.state == "T":
        since = f" for {rank.stopped_s:.1f} s" if rank.stopped_s else ""
        said.append(f"stopped{since} by a signal: it does nothing before SIGCONT")
    elif rank.state == "t":
        said.append("a debugger or tracer is attached and holds it")
    elif rank.state == "Z":
        said.append("a zombie: its main thread has ended, the process cannot be reaped yet")
    elif rank.state == "D":
        said.append("in an uninterruptible wait in the kernel: not even SIGKILL ends it before that is over")
    if rank.state not in ("T", "t", "Z"):
        said += _kernel_wait(rank)
    # A main thread that runs has the GIL as a rule; one that has it and sleeps keeps it from all others.
    if holder is not None and (not holder.main or (rank.culprit and rank.state in ("S", "D"))):
        own = holder.own or (holder.frames[0] if holder.frames else None)
        at = f", in {own.function} ({own.at})" if own else ""
        said.append(f"thread {holder.name!r} holds Python's lock (GIL){at}")
    if rank.culprit and rank.children:
        said.append(f"processes below it: {'; '.join(rank.children[:8])}")
    if rank.window_s > 0 and rank.cpu_s >= 0:
        share = 100 * rank.cpu_s / rank.window_s
        # That a rank which waits uses nothing is no news.
        if rank.culprit or share >= _BUSY:
            moved = f", {_bytes(rank.io_bytes)} read and written" if rank.io_bytes > 0 else ", no I/O"
            said.append(f"used {share:.0f} % of a CPU over {rank.window_s:.1f} s, children included{moved}")
    return tuple(said)


def _kernel_wait(rank: RankFacts) -> list[str]:
    """Where in the kernel the main thread is: nobody's in particular unless it is a culprit's, or no usual wait."""
    what = waits_for([rank.wchan, *rank.kernel])
    at = ", ".join(part for part in (rank.call, rank.wchan) if part)
    if what and (rank.culprit or rank.state == "D" or what not in _USUAL):
        return [f"in the kernel, waiting for {what}" + (f" ({at})" if at else "")]
    return [f"in the kernel ({at})"] if at and (rank.culprit or rank.state == "D") else []


def waits_for(functions: Sequence[str]) -> str:
    """What a process in these kernel functions waits for, "" if that says nothing to a person."""
    # A kernel stack's line is "[<0>] nfs_wait_on_request+0x4c/0x70 [nfs]".
    names = [function.removeprefix("[<0>] ").lstrip("_") for function in functions]
    return next((what for starts, what in _KERNEL if any(name.startswith(starts) for name in names)), "")


def _state(ranks: Sequence[RankFacts], number: int) -> str:
    state = next(rank.state for rank in ranks if rank.rank == number)
    return {"T": "stopped", "Z": "a zombie"}.get(state, state)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"

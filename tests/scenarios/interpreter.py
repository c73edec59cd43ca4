"""Runs a scenario: lines that begin with '>' are what happens, the lines below each are what the agent then did.

    > job slots=0-3 workers=2:4        first line: the node's slots, workers asked for; max-restarts=N first=N plain=1
    > exit rank=1 SIGKILL              a worker ended: a signal's name, or code=N, or code=N and its last words:
    > exit rank=0 code=1 ValueError: bad learning rate         an uncaught exception
    > exit rank=0 code=2 exit                                  sys.exit
    > step 120                         a worker committed this step (the first of a round is its first step)
    > saved 100                        rank 0 saved a checkpoint of this step
    > gone | store KILLED-BY | hung rank=R WHY | stop SIGTERM | stop-again SIGTERM | start-failed WHY
    > wait 0.5                         so many seconds pass
    > again 2                          the store says once more that this round was published

Events of a group are of the round that runs or is ending, unless round=N says otherwise. '#' begins a comment.
"""

from __future__ import annotations

import signal

from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import (
    Action,
    Ended,
    Event,
    ExitReport,
    ExitStatus,
    FirstStep,
    Flush,
    Flushing,
    GroupEnded,
    Joining,
    KillGroup,
    Leave,
    Phase,
    ReportDone,
    ReportFailure,
    RoundPublished,
    Running,
    SetTimer,
    Settling,
    StartFailed,
    StartGroup,
    StopForced,
    StopGroup,
    Stopping,
    StopRequested,
    StoreExited,
    WorkerExited,
)
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.view import Requirements
from tests.rendezvous.world import NODE, World


class ScriptedWorld(World):
    """A World that writes down every move."""

    def log_transition(self, before: Phase, event: Event, actions: list[Action]) -> None:
        was, now = _phase(before), _phase(self.phase)
        self.lines.append(was if was == now else f"{was} -> {now}")
        self.lines.extend(f"  {_action(a, self.now)}" for a in actions)


def rerun(text: str) -> str:
    """The scenario as it should read: its inputs and comments, and what they lead to now."""
    world: ScriptedWorld | None = None
    out: list[str] = []
    for line in text.splitlines():
        if not line.startswith(">"):
            if line.startswith("#") or not line:
                out.append(line)
            continue
        verb, *words = line[1:].split()
        out.append(line)
        if world is None:
            assert verb == "job", "a scenario begins with > job"
            world = _job(words)
            world.look()
        else:
            _happen(world, verb, words)
        out.extend(world.lines)
        world.lines.clear()
    return "\n".join(out) + "\n"


def _job(words: list[str]) -> ScriptedWorld:
    options = dict(w.split("=") for w in words)
    first, _, last = options["slots"].partition("-")
    fewest, _, most = options["workers"].partition(":")
    restarts = options.get("max-restarts")
    return ScriptedWorld(
        tuple(range(int(first), int(last or first) + 1)),
        Requirements(int(fewest), int(most or fewest)),
        Policy(max_restarts=None if restarts is None else int(restarts)),
        first_round_number=int(options.get("first", 1)),
        plain=bool(options.get("plain")),
    )


def _happen(world: ScriptedWorld, verb: str, words: list[str]) -> None:
    options = dict(w.split("=") for w in words if w.startswith(("round=", "rank=", "code=")))
    rest = [w for w in words if not w.startswith(("round=", "rank=", "code="))]
    number = int(options.get("round", world.alive or 0))
    if verb == "wait":
        world.pass_time(world.now + float(rest[0]))
    elif verb == "hung":
        world.hung(int(options["rank"]), " ".join(rest))
    elif verb == "saved":
        world.saved(number, int(rest[0]))
    elif verb == "step":
        first = not (isinstance(world.phase, Running) and world.phase.has_stepped)
        world.trained(int(rest[0]))
        if first:
            world.feed(FirstStep(number, world.now))
    else:
        world.feed(_event(world, verb, number, options, rest))


def _event(world: ScriptedWorld, verb: str, number: int, options: dict[str, str], rest: list[str]) -> Event:
    why = " ".join(rest)
    match verb:
        case "exit":
            return _exit(world, number, int(options["rank"]), options.get("code"), why)
        case "gone":
            return GroupEnded(number)
        case "store":
            return StoreExited(number, why, world.now)
        case "start-failed":
            return StartFailed(number, why, world.now)
        case "stop" | "stop-again":
            event = StopRequested if verb == "stop" else StopForced
            return event(why, 128 + signal.Signals[why], world.now)
        case "again":
            return RoundPublished(next(r for r in world.rounds if r.number == int(why)))
    raise ValueError(f"no such input: {verb}")


def _exit(world: ScriptedWorld, number: int, rank: int, code: str | None, words: str) -> WorkerExited:
    place = next(
        (p for r in world.rounds if r.number == number for p in r.assignments() if p[0] == rank), (0, NODE, rank, 0)
    )
    last_words = None
    if code is None:
        status = ExitStatus(None, signal.Signals[words])
    else:
        status = ExitStatus(int(code))
        if words == "exit":
            last_words = ExitReport("exit", "SystemExit", code, "")
        elif words:
            kind, _, message = words.partition(": ")
            last_words = ExitReport("exception", kind, message, f"Traceback …\n{words}")
    return WorkerExited(number, rank, place[2], place[3], status, last_words, world.now, world.now - world.started_at)


def _phase(phase: Phase) -> str:
    match phase:
        case Joining(past, stop):
            return f"Joining after {past}" + (f", {stop.signal}" if stop else "")
        case Running(r, exits, first_step):
            return f"Running {r.number}{' training' if first_step else ''}" + _exits(exits)
        case Settling(r, exits):
            return f"Settling {r.number}" + _exits(exits)
        case Stopping(r, then, stop):
            return f"Stopping {r.number}" + _then(then) + (f", {stop.signal}" if stop else "")
        case Flushing(_, exit_code):
            return f"Flushing before {exit_code}"
        case Ended(_, exit_code):
            return f"Ended with {exit_code}"


def _exits(exits: tuple[WorkerExited, ...]) -> str:
    return f", {len(exits)} ended" if exits else ""


def _then(then: Round | None) -> str:
    return f", then {then.outcome or then.number}" if then else ""


def _action(action: Action, now: float) -> str:
    match action:
        case StartGroup(r):
            where = " ".join(f"{rank}@{slot}" for rank, _, _, slot in r.assignments())
            return f"StartGroup {r.number}: rank@slot {where}"
        case KillGroup(number, why):
            return f"KillGroup {number}: {why}"
        case StopGroup(number, why, grace_s, name):
            return f"StopGroup {number} by {name}, {grace_s:g} s: {why}"
        case ReportFailure(f):
            culprits = ", ".join(f"rank {rank} (slot {slot})" for rank, slot in f.culprits) or "nobody"
            return f"ReportFailure {f.kind} by {culprits}: {f.why}"
        case ReportDone(number):
            return f"ReportDone {number}"
        case SetTimer(at):
            return f"Wake in {at - now:g} s"
        case Flush(failed):
            return "Flush" + (" with time" if failed else "")
        case Leave(exit_code, why):
            return f"Leave with {exit_code}: {why}"

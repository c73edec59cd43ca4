"""Runs a scenario of many nodes: lines that begin with '>' are what happens, those below each are what came of it.

    > job nodes=2:3 holds             first line; also slots=N, run=N, any number of Policy: adopt_timeout_s=5
                                      stays=2: workers keep their processes; a new one needs 2 s to its entry; spares=K
                                      c10d: a store that compares one key at a time
                                    host=a: a c10d store that ends with a's agent, and is empty when a starts again
    > start a b c                     agents start; b2=b: labelled b2, says it is node b; c:eval: with --role eval
                                      c@1.1: an elasticd one minor version newer, whose records have a field more
    > kill b | vanish b               its processes end; or the machine does, and no connection is reset
    > delay a 12                      a stands still for so long before it writes a Round next
    > freeze b | thaw b               all its processes are stopped, or continue
    > cut a from store | peers | b    packets are dropped silently; several words are several cuts
    > heal a                          a reaches everything again
    > exit a SIGKILL                  a worker of a ends: a signal's name, or code=N, or code=1 ValueError: bad value
    > hang a sleeps | burns | stopped | collective | over    a's workers stand still, in this way; or train again
    > finish [a b]                    workers come to their end, code 0: of these nodes, or of all
    > clock a +60                     a's monotonic clock jumps ahead by so many seconds
    > stop a SIGTERM                  a's agent is asked to stop
    > deaf agents                     none of them answers a probe, as behind a firewall
    > twins allowed                   two rounds may be numbered alike, which is what the scenario is about
    > store down | up | empty         it does not answer; it answers again; it has lost its data
    > run 24                          agents that start from now on are of this run of the job
    > hints dropped | delivered       watches are silent, or work again
    > undying b 1 | dies b            b's worker in slot 1 will not die of SIGKILL; it ends at last
    > wait 3                          so many seconds pass
    > put round {"version": "2.0"}    that is written under the job's key; del round: it is deleted
    > get round                       its value: the version that wrote it, and the fields that only that version has
    > show [requests]                 what each node runs; and its requests to the store since the last show

Times are seconds since the last input other than wait. What several agents log in one moment is one line.
'#' begins a comment.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import fields, replace

from benchmarks.history import History, breaches
from elasticd_agent.model.codec import VERSION
from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import ExitReport, ExitStatus
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.view import Requirements
from elasticd_agent.workers.environment import role_rank_and_size
from tests.scenarios.cluster import Cluster

MISSED_S = 15.0
"""Where watches are silent, every agent reads its keys every 10 s."""
TOGETHER_S = 0.05
"""What comes so close together is one moment to a reader."""


class ScriptedCluster:
    """A Cluster driven by words, and when the last of them were said."""

    def __init__(self, words: list[str]) -> None:
        options = dict(w.partition("=")[::2] for w in words)
        fewest, _, most = options.pop("nodes").partition(":")
        holds, host = options.pop("holds", None) is not None, options.pop("host", "")
        c10d = options.pop("c10d", None) is not None or bool(host)
        slots, run = int(options.pop("slots", 1)), options.pop("run", "")
        stays, spares = float(options.pop("stays", 0)), int(options.pop("spares", 0))
        kinds = {f.name: f.type for f in fields(Policy)}
        numbers = {name: _number(kinds[name], text) for name, text in options.items()}
        policy = replace(Policy(), **numbers)
        asked = Requirements(1, slots, int(fewest), int(most or fewest), policy.last_call_timeout_s, run, spares)
        self.cluster = Cluster(asked, policy, slots, holds)
        self.cluster.start_s = stays
        self.cluster.host, self.cluster.compares_one_key = host, c10d
        self.at = self.shown_at = self.cluster.now
        self._requests: dict[str, int] = {}

    def happen(self, verb: str, words: list[str]) -> list[str]:
        if verb != "wait":
            self.at = self.cluster.now
        if verb == "show":
            return self._show(requests=words == ["requests"])
        if verb == "get":
            return self._get(words[0])
        self._happen(verb, words)
        told, self.cluster.lines = self.cluster.lines, []
        return [f"  +{at - self.at:.2f} {_to(who)}{what}" for at, who, what in _merged(told)]

    def _happen(self, verb: str, words: list[str]) -> None:
        c = self.cluster
        match verb, words:
            case "start", _:
                for word in words:
                    rest, _, version = word.partition("@")
                    rest, _, role = rest.partition(":")
                    label, _, name = rest.partition("=")
                    c.start(label, name or label, role or "default", version or VERSION)
            case "run", [run]:
                c.asked = replace(c.asked, run=run)
            case (("kill" | "vanish" | "freeze" | "thaw" | "heal"), _):
                for label in words:
                    getattr(c, verb)(label)
            case "cut", [label, "from", *others]:
                for other in others:
                    c.cut(
                        label, store=other == "store", peers=other == "peers", peer=other if other in c.nodes else None
                    )
            case "hang", [label, ("sleeps" | "burns" | "stopped" | "collective") as how]:
                c.hang(label, how)
            case "delay", [label, seconds]:
                c.delay(label, float(seconds))
            case "hang", [label, "over"]:
                c.hang(label, "")
            case "exit", [label, *rest]:
                c.exit(label, 0, *_end(rest))
            case "finish", _:
                c.finish(*words)
            case "undying", [label, slot]:
                c.cling(label, int(slot))
            case "dies", [label]:
                c.let_go(label)
            case "clock", [label, seconds]:
                c.jump(label, float(seconds))
            case "stop", [label, name]:
                c.stop(label, name)
            case "put", [key, *rest]:
                there = c.store.read(self._key(key))
                c.store.compare_and_swap(self._key(key), there and there.version, " ".join(rest).encode())
            case "del", [key]:
                c.store.delete(self._key(key))
            case "deaf", ["agents"]:
                c.deaf = True
            case "twins", ["allowed"]:
                c.twins = True
            case "store", ["down" | "up" as how]:
                c.store_up = how == "up"
            case "store", ["empty"]:
                c.empty_store()
            case "hints", ["dropped"]:
                c.hints = lambda deliver: None
                c.history.window_s = MISSED_S
            case "hints", ["delivered"]:
                c.hints = lambda deliver: deliver()
            case "wait", [seconds]:
                c.wait(float(seconds))
            case _:
                raise ValueError(f"no such input: {verb} {' '.join(words)}")
        if verb != "wait":
            c.wait(0)

    def _get(self, key: str) -> list[str]:
        found = self.cluster.store.read(self._key(key))
        text = "nothing" if found is None else found.value.decode()
        if text.startswith("{"):
            record = json.loads(text)
            news = sorted(name for name in record if name.startswith("news_of"))
            number = [f"number {record['number']}"] if "number" in record else []
            run = [f"run {record['run']}"] if record.get("run") else []
            text = ", ".join([*number, *run, f"version {record['version']}", *news])
        return [f"  {key}: {text}"]

    def _key(self, name: str) -> str:
        return self.cluster.keys.round.removesuffix("round") + name

    def _show(self, *, requests: bool) -> list[str]:
        c, out = self.cluster, []
        elapsed_s, self.shown_at = c.now - self.shown_at, c.now
        for label, node in sorted(c.nodes.items()):
            asked = len(node.store.requests)
            rate = (asked - self._requests.get(label, 0)) / elapsed_s if elapsed_s else 0.0
            self._requests[label] = asked
            if node.dead or node.left:
                continue
            runs = f"in round {node.group.number}{_as(node.group, node.name)}" if node.group else "runs nothing"
            plans = ", plans" if node.member.leads else ""
            out.append(f"  {label}: {runs}{plans}" + (f", {rate:.1f} requests/s" if requests else ""))
        trains = [n for n, at in c.trained.items() if at > c.now - 0.25]
        return [*out, f"  trains: {', '.join(f'round {n}' for n in trains) or 'nothing'}"]


def rerun(text: str) -> str:
    """The scenario as it should read: its inputs and comments, and what they lead to now. No promise is broken."""
    transcript, history = play(text)
    assert breaches(history) == []
    return transcript


def play(text: str) -> tuple[str, History]:
    """The transcript, and every agent's view of it."""
    told: ScriptedCluster | None = None
    out: list[str] = []
    for line in text.splitlines():
        if not line.startswith(">"):
            if line.startswith("#") or not line:
                out.append(line)
            continue
        verb, *words = line[1:].split()
        out.append(line)
        if told is None:
            assert verb == "job", "a scenario begins with > job"
            told = ScriptedCluster(words)
        else:
            out += told.happen(verb, words)
    return "\n".join(out) + "\n", told.cluster.history


def _merged(told: Iterable[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """What several said within one moment, under all their names, where the first of them said it."""
    out: list[tuple[float, list[str], str]] = []
    for at, who, what in told:
        near = next((o for o in out if who and o[1][0] and o[2] == what and at - o[0] < TOGETHER_S), None)
        if near is None:
            out.append((at, [who], what))
        else:
            near[1].append(who)
    return [(at, " ".join(sorted(who)), what) for at, who, what in out]


def _to(who: str) -> str:
    return f"{who}: " if who else ""


def _as(round: Round, node: str) -> str:
    """Its role and its place in it, where there are roles."""
    member = round.member(node)
    if member is None or len({m.role for m in round.members}) == 1:
        return ""
    first, world = role_rank_and_size(round, node, member.role)
    return f" as {member.role}, ROLE_RANK {first} of {world}"


def _number(kind: object, text: str) -> int | float | str:
    if "int" in str(kind):
        return int(text)
    return float(text) if "float" in str(kind) else text


def _end(words: list[str]) -> tuple[ExitStatus, ExitReport | None]:
    if not words[0].startswith("code="):
        return ExitStatus(None, signal.Signals[words[0]]), None
    status = ExitStatus(int(words[0].removeprefix("code=")))
    if not words[1:]:
        return status, None
    kind, _, message = " ".join(words[1:]).partition(": ")
    return status, ExitReport("exception", kind, message, f"Traceback …\n{kind}: {message}")

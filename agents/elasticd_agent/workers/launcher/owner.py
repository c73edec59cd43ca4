"""The owner: the parent of every process a job runs on this node, and the one who ends them all.

It exists so that no death leaves anything behind. It is a child subreaper, so whatever a worker starts, daemonised or
not, becomes its child in the end; when the agent dies it sees the end of file on its socket and kills every descendant
it has; when it dies itself, PDEATHSIG ends the template, the workers and the store. It decides nothing: it starts,
releases, signals and reaps what the agent names, and says what happened.

Runs as `python -I -S owner.py FD RUNTIME_DIR [KEPT_FD ...]`, in one thread: the standard library and four files beside
it. KEPT_FDs it only keeps open, for as long as anything is left to end: a lock on one of them says that.

Messages are one JSON object a packet. From the agent ("do"): template, park, release, exec, signal, end_template.
To the agent ("is"): template_ready, template_gone, parked, refused, store_ready, started, exited, gone, freed.
`gone` names what does not die (`stuck`); `freed` follows for each of these that does at last.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # run as a file, isolated: the standard library comes first, what we are part of last
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from elasticd_agent.system.process import IGNORED_SIGNALS, prctl, spawn
from elasticd_agent.workers.launcher.owned_group import LEFTOVER_GRACE_S, STORE_RANK, OwnedGroup
from elasticd_agent.workers.launcher.reaping import (
    CLEANER_GRACE_S,
    children,
    describe_status,
    end_children,
    is_cleaner,
    signal_child,
)
from elasticd_agent.workers.launcher.sockets import PACKET, encode, listen, pair

PR_SET_CHILD_SUBREAPER, PR_SET_NAME = 36, 15
Message = dict[str, Any]


class Owner:
    """One loop over the agent's socket, the template's socket and SIGCHLD."""

    def __init__(self, agent: socket.socket, runtime_dir: str) -> None:
        self.agent = agent
        self.runtime_dir = runtime_dir
        self.groups: dict[int, OwnedGroup] = {}
        self.template: socket.socket | None = None
        self.template_pid = 0
        self.early_exits: dict[int, tuple[int, float]] = {}  # exits of children we have not been told of yet
        self.unkillable: set[int] = set()  # were sent SIGKILL and do not die; their groups are gone
        self.running = True
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.wakeup = read
        self.poll = select.poll()
        for fd in (self.agent.fileno(), read):
            self.poll.register(fd, select.POLLIN)

    def send(self, **message: Any) -> None:
        try:
            self.agent.send(encode(message))
        except OSError:
            self.running = False  # the agent is gone; the loop ends everything

    def run(self) -> None:
        try:
            self.serve()
        finally:  # a mistake of ours, too, ends with nothing left behind
            self.end_everything()

    def serve(self) -> None:
        while self.running:
            waiting = any(group.ending() for group in self.groups.values())
            for fd, _ in self.poll.poll(50 if waiting else None):
                if fd == self.wakeup:
                    os.read(fd, 4096)
                elif fd == self.agent.fileno():
                    self.receive_from_agent()
                elif self.template is not None and fd == self.template.fileno():
                    self.receive_from_template()
            self.reap()
            for group in list(self.groups.values()):
                self.finish(group)

    def receive_from_agent(self) -> None:
        try:
            packet = self.agent.recv(PACKET)
        except OSError:  # a reset, not an end of file, when the agent died with words of ours unread
            packet = b""
        if not packet:
            self.running = False
            return
        message = json.loads(packet)
        verb: Callable[[Message], None] | None = getattr(self, f"do_{message['do']}", None)
        try:
            if verb is None:  # an agent one minor version newer may ask for more than we can do
                raise OSError("this launcher is older and cannot do that")
            verb(message)
        except OSError as error:
            group = self.groups.get(message.get("group"))
            if group is not None and not group.running:
                self.drop(group)
            self.send(**{"is": "refused", "group": message.get("group"), "why": f"{message['do']}: {error}"})

    # --- the template -------------------------------------------------------------------------------------------

    def do_template(self, message: Message) -> None:
        """Start the template: {argv, env, cwd, launch}; `launch` reaches the start-up hook through the environment."""
        ours, theirs = pair()
        launch = {**message["launch"], "fd": theirs.fileno(), "owner": os.getpid()}
        env = {**message["env"], "ELASTICD_LAUNCH": json.dumps(launch)}
        os.set_inheritable(theirs.fileno(), True)
        self.template_pid = spawn(message["argv"], env, message["cwd"], None, None)
        theirs.close()
        self.template = ours
        self.poll.register(ours.fileno(), select.POLLIN)

    def do_end_template(self, message: Message) -> None:
        if self.template_pid:
            signal_child(self.template_pid, signal.SIGKILL)

    def receive_from_template(self) -> None:
        assert self.template is not None
        try:
            packet = self.template.recv(PACKET)
        except OSError:
            packet = b""
        if not packet:
            self.template_lost("closed its socket")
            return
        message = json.loads(packet)
        if message["is"] == "forked":
            self.adopt(message)
            return
        if message["is"] == "refused" and message["group"] in self.groups:
            self.drop(self.groups[message["group"]])
        self.send(**message)

    def template_lost(self, why: str) -> None:
        if self.template is not None:
            self.poll.unregister(self.template.fileno())
            self.template.close()
            self.template = None
        for group in list(self.groups.values()):
            if not group.running and not group.alive:  # asked for, never forked
                self.drop(group)
                self.send(**{"is": "refused", "group": group.name, "why": f"the template ended: {why}"})
        if self.template_pid:
            signal_child(self.template_pid, signal.SIGKILL)
            self.send(**{"is": "template_gone", "why": why})
            self.template_pid = 0

    # --- groups -------------------------------------------------------------------------------------------------

    def do_park(self, message: Message) -> None:
        """Fork a group that waits: {group, workers, store, host, port}.

        With a `store` there is one more process, which starts to serve at once if the port is 0, else at release.
        """
        name, ranks = message["group"], [*[STORE_RANK] * message["store"], *range(message["workers"])]
        if self.template is None:
            raise OSError("there is no template")
        ours, theirs = {}, []
        for rank in ranks:
            ours[rank], end_for_child = pair()
            theirs.append(end_for_child)
        group = OwnedGroup(name, ours)
        if message["store"] and message["port"] == 0:
            self.give_store_its_port(group, message["host"], 0)
        self.groups[name] = group
        request = encode({"fork": name, "store": message["store"]})
        socket.send_fds(self.template, [request], [end_for_child.fileno() for end_for_child in theirs])
        for end_for_child in theirs:
            end_for_child.close()

    def adopt(self, message: Message) -> None:
        group = self.groups.get(message["group"])
        if group is None:  # dropped meanwhile
            for pid in message["pids"]:
                signal_child(pid, signal.SIGKILL)
            return
        for rank, pid in zip(group.channels, message["pids"], strict=True):
            group.alive[pid] = rank
        self.send(**{"is": "parked", "group": group.name, "pids": message["pids"]})
        for pid in list(group.alive):
            status, at = self.early_exits.pop(pid, (0, 0.0))
            if at > group.since:  # otherwise another process had that number before
                self.member_exited(group, pid, status, at)

    def do_release(self, message: Message) -> None:
        """Let a parked group go: {group, store, keep, host, port, workers: [{env, stdout, stderr}]}; the surplus ends.

        Without a `store` of its own the group joins one elsewhere, which its workers' `env` names already. With `keep`
        the store outlives a group that ends well, until the group is sent SIGKILL.
        """
        group = self.groups.get(message["group"])
        if group is None or not group.alive:
            raise OSError("there is no such parked group")
        if message["store"]:
            if group.port == 0:
                self.give_store_its_port(group, message["host"], message["port"])
            self.report_port(group)
        else:
            group.port = 0  # a parked store that is not wanted serves nobody
        pids = {rank: pid for pid, rank in group.alive.items()}
        for rank, worker in enumerate(message["workers"]):
            try:
                group.channels[rank].send(encode(self.with_port(group, worker)))
            except OSError:
                pass  # it died while parked: its exit is told like any other
        for rank in [
            rank for rank in pids if rank >= len(message["workers"]) or (rank == STORE_RANK and not group.port)
        ]:
            del group.alive[pids[rank]]
            signal_child(pids.pop(rank), signal.SIGKILL)
        for rank in [rank for rank in group.channels if rank != STORE_RANK or rank not in pids]:
            group.channels.pop(rank).close()
        self.begin(group, pids, message["keep"])

    def do_exec(self, message: Message) -> None:
        """Start a group cold: {group, store, keep, host, port, cwd, env, workers: [{argv, env, stdout, stderr}]}.

        A worker's `env` is what it has besides everybody's. `store` is {argv} or None; all else is as in `do_release`.
        """
        group = self.groups[message["group"]] = OwnedGroup(message["group"], {})
        if message["store"] is not None:
            self.exec_store(group, message)
        for rank, worker in enumerate(message["workers"]):
            env = {**message["env"], **self.with_port(group, worker)["env"]}
            group.alive[spawn(worker["argv"], env, message["cwd"], worker["stdout"], worker["stderr"])] = rank
        self.begin(group, {rank: pid for pid, rank in group.alive.items()}, message["keep"])

    def begin(self, group: OwnedGroup, pids: dict[int, int], keeps_store: bool) -> None:
        group.running, group.keeps_store, group.ranks = True, keeps_store, dict(group.alive)
        workers = [pids[rank] for rank in sorted(pids) if rank != STORE_RANK]
        self.send(**{"is": "started", "group": group.name, "pids": workers, "store": pids.get(STORE_RANK, 0)})

    # --- the round's store --------------------------------------------------------------------------------------

    def give_store_its_port(self, group: OwnedGroup, host: str, port: int) -> None:
        with listen(host, port) as listener:
            group.port = listener.getsockname()[1]
            socket.send_fds(group.channels[STORE_RANK], [encode({"host": host})], [listener.fileno()])

    def exec_store(self, group: OwnedGroup, message: Message) -> None:
        group.channels[STORE_RANK], theirs = pair()
        with theirs, listen(message["host"], message["port"]) as listener:
            group.port = listener.getsockname()[1]
            for fd in (listener.fileno(), theirs.fileno()):
                os.set_inheritable(fd, True)
            argv = [*message["store"]["argv"], message["host"], str(listener.fileno()), str(theirs.fileno())]
            group.alive[spawn(argv, message["env"], message["cwd"], None, None)] = STORE_RANK
        self.report_port(group)

    def report_port(self, group: OwnedGroup) -> None:
        """Before a worker runs: who listens accepts, and other nodes' workers need the port as soon as ours."""
        self.send(**{"is": "store_ready", "group": group.name, "port": group.port})

    def with_port(self, group: OwnedGroup, worker: Message) -> Message:
        """The worker, told of the group's own store if it has one."""
        own = {"MASTER_PORT": str(group.port)} if group.port else {}
        return {**worker, "env": {**worker["env"], **own}}

    # --- signals ------------------------------------------------------------------------------------------------

    def do_signal(self, message: Message) -> None:
        """Send {group, signal}; SIGKILL reaches the store too, and what the workers left behind."""
        group = self.groups.get(message["group"])
        if group is None:
            return
        if message["signal"] == signal.SIGKILL:
            group.failed = True
            if not group.running or group.gone:
                self.drop(group)
                return
            self.kill_members(group)
        else:
            for pid in group.workers():
                signal_child(pid, message["signal"])

    def kill_members(self, group: OwnedGroup) -> None:
        if group.killed_at is None:
            group.killed_at = time.monotonic()
        for pid in group.alive:
            signal_child(pid, signal.SIGKILL)

    def drop(self, group: OwnedGroup) -> None:
        for channel in group.channels.values():
            channel.close()
        for pid in group.alive:
            signal_child(pid, signal.SIGKILL)
        self.groups.pop(group.name, None)

    # --- deaths -------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect every child that ended. What it leaves behind becomes our child: see `finish`."""
        while True:
            try:
                dead, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not dead:
                return
            now = time.monotonic()
            group = next((g for g in self.groups.values() if dead in g.alive), None)
            if group is not None:
                self.member_exited(group, dead, status, now)
            elif dead in self.unkillable:
                self.unkillable.discard(dead)
                self.send(**{"is": "freed", "pid": dead})
            elif dead == self.template_pid:
                self.template_pid = 0
                why = describe_status(status)
                self.send(**{"is": "template_gone", "why": why})
                self.template_lost(why)
            else:
                self.early_exits[dead] = (status, now)
                while len(self.early_exits) > 1024:
                    self.early_exits.pop(next(iter(self.early_exits)))

    def member_exited(self, group: OwnedGroup, pid: int, status: int, at: float) -> None:
        rank = group.alive.pop(pid)
        group.last_exit_at = at
        if not group.running:
            self.drop(group)
            self.send(**{"is": "refused", "group": group.name, "why": f"a parked process {describe_status(status)}"})
            return
        if group.gone:  # its store was all that was left of it
            self.drop(group)
        self.send(**{"is": "exited", "group": group.name, "local_rank": rank, "pid": pid, "status": status, "at": at})

    def finish(self, group: OwnedGroup) -> None:
        """A running group whose last worker ended is over, and what its workers left behind; and its store, mostly.

        What was sent SIGKILL and does not die is not waited for: it is told of, and reaped whenever it ends.
        """
        if not group.ending():
            return
        now = time.monotonic()
        keeps_store = bool(group.alive) and group.keeps_store and not group.failed
        if not keeps_store:
            self.kill_members(group)
        leftovers = self.leftovers()
        if leftovers and any(not group.running and not group.alive for group in self.groups.values()):
            return  # some of these may be a parked group's: the template is about to tell
        if leftovers and group.leftovers_since is None:
            group.leftovers_since = now
            if not group.failed:
                for pid in leftovers:
                    signal_child(pid, signal.SIGTERM)
        waited = now - max(group.leftovers_since or now, group.last_exit_at)
        if leftovers and (group.failed or waited > LEFTOVER_GRACE_S):
            for pid in leftovers:
                if waited > CLEANER_GRACE_S or not is_cleaner(pid):
                    signal_child(pid, signal.SIGKILL)
        if group.alive and not keeps_store and not group.overdue(now):
            return
        if leftovers and now <= group.leftovers_dead_by():
            return
        self.group_ended(group, keeps_store, leftovers)

    def group_ended(self, group: OwnedGroup, keeps_store: bool, leftovers: list[int]) -> None:
        """Nothing is left of the group but what it keeps and what does not die."""
        undying = [*leftovers, *([] if keeps_store else group.alive)]
        stuck = group.describe_unkillable(undying)
        self.unkillable.update(undying)
        group.gone = True
        if not keeps_store:
            group.alive.clear()
            self.drop(group)
        self.send(**{"is": "gone", "group": group.name, "stuck": stuck})

    def leftovers(self) -> list[int]:
        """Our children that are neither the template nor in a group: orphans of ended workers."""
        known = {self.template_pid, *self.unkillable, *(pid for group in self.groups.values() for pid in group.alive)}
        return [pid for pid in children() if pid not in known]

    def end_everything(self) -> None:
        """Kill every descendant: each death hands us its children, until none is left. Bounded."""
        end_children(2 * LEFTOVER_GRACE_S, except_pids=self.unkillable)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


def main() -> None:
    fd, runtime_dir = int(sys.argv[1]), sys.argv[2]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"elasticd-owner")
    for deaf_to in IGNORED_SIGNALS:
        if signal.getsignal(deaf_to) is not signal.SIG_IGN:  # the agent's end of file is the one thing that ends us
            signal.signal(deaf_to, lambda *_: None)  # a handler, since what is ignored stays ignored in the workers
    agent = socket.socket(fileno=fd)
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    for ours in (fd, *map(int, sys.argv[3:])):
        os.set_inheritable(ours, False)
    Owner(agent, runtime_dir).run()


if __name__ == "__main__":
    main()

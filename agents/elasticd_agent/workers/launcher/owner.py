"""The owner: the parent of every process that a job runs on one node, and the process that ends them all.

**Invariant.** When a group has ended, no process of it is left; when the agent or the owner has died, no process of
the job is left. Only processes that the kernel cannot kill are excepted, and they are reported. Nothing else on a node
can keep this: PDEATHSIG reaches a direct child only, a daemonised grandchild goes to init, where nothing tells whose
it was, and a mark in the environment is lost, since the /proc/PID/environ of a forked worker is its template's.

Each process is covered by one of these:

    worker, store, writer   are children of the owner, which reaps them and reports their exits
    what a worker starts    becomes a child of the owner, a child subreaper, when its parent ends: see `finish`
    the agent dies          its socket reads end of file: `end_everything` kills child after child until none is left
    the owner dies          PDEATHSIG ends template, workers, store and writer; the agent, a subreaper as well, ends
                            what these leave behind, and starts another owner
    the template dies       workers that run are not its children; those that are parked read end of file and exit
    both at one instant     a daemonised grandchild may survive: nobody is left who knows of it

The order of some operations keeps the invariant:

1. A worker arms PDEATHSIG after the owner has adopted it. PDEATHSIG refers to the parent at the time of the call, which
   until then is the intermediate process of the template; the worker would die with that.
2. The exit of a child that the template has not reported yet is kept in `early_exits`, with its time. Without that a
   worker which dies at once would be waited for until its round is given up; without the time an earlier process with
   the same pid would be taken for it.
3. A pid is signalled only until its process has been reaped. The kernel gives it to no other process before, so no
   pidfd is needed.
4. A group's leftovers are looked for only while the template forks no group. A worker that it has forked and not
   reported yet would look like one.
5. A store listens before a worker runs, and its port is reported before `started`. Workers of other nodes would spend
   their first second on a refused connection.
6. A signal with `save` waits for the ranks that save, until a deadline, and then becomes the signal that was asked for.
   A second SIGKILL does not shorten that; closing the socket does.

The owner decides nothing about the job: what the death of a rank means is the agent's concern. Processes that survive
SIGKILL are waited for until a deadline and then reported with `ended`; `reaped` follows when one of them ends after
all.

It runs as `python -I -S owner.py FD RUNTIME_DIR [KEPT_FD ...]`, in one thread, with the standard library and a few
modules of ours that need no more. Each KEPT_FD stays open as long as there is a process to end: a lock on it shows
that.

Messages are one JSON object a packet. Requests of the agent ("do"): writer, template, park, release, release_held,
exec, signal, flush, end_template. Reports to the agent ("kind"): template_ready, template_ended, template_unfit,
preloading, parked, refused, store_ready, started, released, exited, ended, reaped, flushing, flushed, unsaved,
without_writer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

if __name__ == "__main__":  # run as a file, isolated: our own packages come after the standard library
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from elasticd_agent.system.processes.process import (
    CLEANER_GRACE_S,
    IGNORED_SIGNALS,
    children,
    describe_status,
    end_children,
    ignore_signal,
    is_shell,
    may_be_cleaner,
    prctl,
    session_of,
    signal_child,
    spawn,
    take_signals,
)
from elasticd_agent.workers.launcher.owned_group import LEFTOVER_GRACE_S, STORE_RANK, OwnedGroup
from elasticd_agent.workers.launcher.sockets import PACKET, encode, listen, pair
from elasticd_agent.workers.launcher.writer_process import WriterProcess

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
        self.writer: WriterProcess | None = None
        self.flushing: socket.socket | None = None
        """Where the writer says that everything is on the disk."""
        self.flushed_again = False
        self.early_exits: dict[int, tuple[int, float]] = {}
        """Exits of children that the template has not reported yet: pid -> status, time."""
        self.unkillable: set[int] = set()
        """Processes that survive SIGKILL and whose groups have ended."""
        self.running = True
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.wakeup = read
        self.poll = select.poll()
        for fd in (self.agent.fileno(), read):
            self.poll.register(fd, select.POLLIN)

    def send(self, kind: str, **fields: Any) -> None:
        try:
            self.agent.send(encode({"kind": kind, **fields}))
        except OSError:
            self.running = False  # the agent has died; the loop ends everything

    def run(self) -> None:
        try:
            self.serve()
        finally:  # an error in this program, too, leaves no process behind
            self.end_everything()

    def serve(self) -> None:
        while self.running:
            waiting = any(group.is_ending() or group.saving for group in self.groups.values())
            saving = {group.saving.fileno(): group for group in self.groups.values() if group.saving is not None}
            for fd, _ in self.poll.poll(50 if waiting else None):
                if fd == self.wakeup:
                    os.read(fd, 4096)
                elif fd == self.agent.fileno():
                    self.receive_from_agent()
                elif self.template is not None and fd == self.template.fileno():
                    self.receive_from_template()
                elif fd in saving:
                    self.receive_from_donors(saving[fd])
                elif self.flushing is not None and fd == self.flushing.fileno():
                    self.flushed()
                elif self.writer is not None:
                    self.poll.unregister(fd)  # the writer itself listens until it ends
                    if why := self.writer.start():
                        self.send("without_writer", why=why)
            self.reap()
            for group in list(self.groups.values()):
                self.finish(group)

    def receive_from_agent(self) -> None:
        try:
            packet = self.agent.recv(PACKET)
        except OSError:  # a reset instead of end of file: the agent died before it had read all reports
            packet = b""
        if not packet:
            self.running = False
            return
        message = json.loads(packet)
        verb: Callable[[Message], None] | None = getattr(self, f"do_{message['do']}", None)
        try:
            if verb is None:  # an agent that is one minor version newer may send requests unknown here
                raise OSError("this launcher is older and cannot do that")
            verb(message)
        except OSError as error:
            group = self.groups.get(message.get("group"))
            if group is not None and not group.running:
                self.drop(group)
            self.send("refused", group=message.get("group"), why=f"{message['do']}: {error}")

    def do_writer(self, message: Message) -> None:
        """Hold memory for saved states, and start the writer when a rank connects to its socket: {argv, env}."""
        try:
            self.writer = WriterProcess(message["argv"], message["env"], self.runtime_dir)
        except OSError as error:
            self.send("without_writer", why=str(error))
            return
        self.poll.register(self.writer.listener.fileno(), select.POLLIN)

    def do_flush(self, message: Message) -> None:
        """No round follows: have the writer write what it holds.

        `flushing` follows, with the bytes of the largest state, and `flushed`, with what became of it; or only the
        latter, if there is nothing.
        """
        self.flushing = self.writer.request_flush() if self.writer is not None else None
        if self.writer is None or self.flushing is None:
            self.send("flushed")
        else:
            self.send("flushing", bytes=self.writer.held_bytes())
            self.poll.register(self.flushing.fileno(), select.POLLIN)

    def flushed(self) -> None:
        assert self.flushing is not None
        answer = receive(self.flushing)
        self.poll.unregister(self.flushing.fileno())
        self.flushing.close()
        self.flushing = None
        if not answer and not self.flushed_again:  # it has died, and another one finds the same states
            self.flushed_again = True
            self.do_flush({})
        else:
            self.send("flushed", **answer)

    # --- the template -------------------------------------------------------------------------------------------

    def do_template(self, message: Message) -> None:
        """Start the template: {argv, env, cwd, launch}; `launch` reaches the start-up hook through the environment."""
        ours, theirs = pair()
        launch = {**message["launch"], "fd": theirs.fileno(), "owner": os.getpid(), "signals": IGNORED_SIGNALS}
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
        kind = message.pop("kind")
        if kind == "forked":
            self.adopt(message)
            return
        if kind == "refused" and message["group"] in self.groups:
            self.drop(self.groups[message["group"]])
        self.send(kind, **message)

    def template_lost(self, why: str) -> None:
        if self.template is not None:
            self.poll.unregister(self.template.fileno())
            self.template.close()
            self.template = None
        for group in list(self.groups.values()):
            if group.is_parked():
                self.drop(group)
                self.send("refused", group=group.name, why=f"the template ended: {why}")
        if self.template_pid:
            signal_child(self.template_pid, signal.SIGKILL)
            self.send("template_ended", why=why)
            self.template_pid = 0

    # --- groups -------------------------------------------------------------------------------------------------

    def do_park(self, message: Message) -> None:
        """Fork a group that waits for its release: {group, workers, store, host, port}.

        With a `store` there is one more process, which serves at once if the port is 0, otherwise from the release on.
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
        if group is None:  # it was dropped meanwhile
            for pid in message["pids"]:
                signal_child(pid, signal.SIGKILL)
            return
        for rank, pid in zip(group.channels, message["pids"], strict=True):
            group.alive[pid] = rank
        self.send("parked", group=group.name, pids=message["pids"])
        for pid in list(group.alive):
            status, at = self.early_exits.pop(pid, (0, 0.0))
            if at > group.since:  # otherwise an earlier process had that pid
                self.member_exited(group, pid, status, at)

    def do_release(self, message: Message) -> None:
        """Release a parked group: {group, store, keep, host, port, workers: [{env, stdout, stderr}], held}; the surplus
        ends.

        Without a `store` the group uses one on another node, which is in its workers' `env` already. With `keep` the
        store outlives a group that succeeds, until the group is sent SIGKILL. `held` are local ranks of workers that
        wait for `release_held`.
        """
        group = self.groups.get(message["group"])
        if group is None or not group.alive:
            raise OSError("there is no such parked group")
        if message["store"]:
            if group.port == 0:
                self.give_store_its_port(group, message["host"], message["port"])
            self.report_port(group)
        else:
            group.port = 0  # the surplus store ends below
        pids = {rank: pid for pid, rank in group.alive.items()}
        for rank, worker in enumerate(message["workers"]):
            group.held[rank] = encode(self.with_port(group, worker))
        for rank in [
            rank for rank in pids if rank >= len(message["workers"]) or (rank == STORE_RANK and not group.port)
        ]:
            del group.alive[pids[rank]]
            signal_child(pids.pop(rank), signal.SIGKILL)
        for rank in [rank for rank in group.channels if rank not in pids]:
            group.channels.pop(rank).close()
        self.release_workers(group, group.held.keys() - set(message["held"]))
        self.begin(group, pids, message["keep"])

    def do_release_held(self, message: Message) -> None:
        """{group, ranks: [local rank]}"""
        group = self.groups.get(message["group"])
        if group is not None:
            self.release_workers(group, message["ranks"])
            self.send("released", group=group.name, ranks=message["ranks"])

    def release_workers(self, group: OwnedGroup, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with group.channels.pop(rank) as channel, contextlib.suppress(OSError):
                channel.send(group.held.pop(rank))  # if it died while parked, its exit is reported like any other

    def do_exec(self, message: Message) -> None:
        """Start a group cold: {group, store, keep, host, port, cwd, env, workers: [{argv, env, stdout, stderr}]}.

        A worker's `env` is added to the common one. `store` is {argv} or None; the other fields are as in `do_release`.
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
        group.running_since = time.monotonic()
        workers = [pids[rank] for rank in sorted(pids) if rank != STORE_RANK]
        self.send("started", group=group.name, pids=workers, store=pids.get(STORE_RANK, 0))

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
            group.alive[spawn(argv, message["env"], message["cwd"], None, None, IGNORED_SIGNALS)] = STORE_RANK
        self.report_port(group)

    def report_port(self, group: OwnedGroup) -> None:
        """Before a worker runs: the socket accepts already, and other nodes' workers need the port as soon as ours."""
        self.send("store_ready", group=group.name, port=group.port)

    def with_port(self, group: OwnedGroup, worker: Message) -> Message:
        """The worker with the port of the group's own store, if it has one."""
        own = {"MASTER_PORT": str(group.port)} if group.port else {}
        return {**worker, "env": {**worker["env"], **own}}

    # --- signals ------------------------------------------------------------------------------------------------

    def do_signal(self, message: Message) -> None:
        """{group, signal[, save]}: SIGKILL also reaches the store, and what the workers left behind.

        With `save`, the number of the round, workers first save the state of their last step, until a deadline.
        """
        group = self.groups.get(message["group"])
        if group is None:
            return
        if message["signal"] == signal.SIGKILL:
            group.failed = True
            if not group.running or group.ended:
                self.drop(group)
                return
        if "save" not in message or not self.request_save(group, message):
            self.signal_members(group, message["signal"])

    def signal_members(self, group: OwnedGroup, signum: int) -> None:
        if signum == signal.SIGKILL:
            self.kill_members(group)
        else:
            group.stopped = True
            group.runs_programs |= any(map(is_shell, group.workers()))
            for pid in group.workers():
                signal_child(pid, signum)

    def request_save(self, group: OwnedGroup, message: Message) -> bool:
        if group.saving is None and self.writer is not None and group.workers():
            group.saving = self.writer.request_save(message["save"], message["signal"] == signal.SIGKILL)
            if group.saving is not None:
                group.saving_since = time.monotonic()
                lost_s = group.saving_since - group.running_since
                group.save_until = group.saving_since + self.writer.longest_save_s(False, lost_s)
                group.after_save = message["signal"]
                self.poll.register(group.saving.fileno(), select.POLLIN)
        if message["signal"] == signal.SIGKILL:
            group.after_save = signal.SIGKILL
        return group.saving is not None

    def receive_from_donors(self, group: OwnedGroup) -> None:
        """They are done, or so many have begun: these get more time than ranks that cannot even begin."""
        assert group.saving is not None and self.writer is not None
        message = receive(group.saving)
        if "busy" in message:
            group.unsaved = message.get("left", 0)
            lost_s = 0.0 if message.get("answered") else group.saving_since - group.running_since
            group.save_until = group.saving_since + self.writer.longest_save_s(message["busy"] > 0, lost_s)
        else:
            self.saved(group)

    def saved(self, group: OwnedGroup) -> None:
        """The workers have saved their state, or had the time for it."""
        self.end_saving(group)
        self.signal_members(group, group.after_save)

    def end_saving(self, group: OwnedGroup) -> None:
        if group.saving is not None:
            self.poll.unregister(group.saving.fileno())
            group.saving.close()
            group.saving = None

    def kill_members(self, group: OwnedGroup) -> None:
        self.end_saving(group)
        if group.killed_at is None:
            group.begin_kill(time.monotonic())
        for pid in group.alive:
            signal_child(pid, signal.SIGKILL)

    def drop(self, group: OwnedGroup) -> None:
        self.end_saving(group)
        for channel in group.channels.values():
            channel.close()
        for pid in group.alive:
            signal_child(pid, signal.SIGKILL)
        self.groups.pop(group.name, None)

    # --- deaths -------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect every child that ended. Its own children become ours: see `finish`."""
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
                self.send("reaped", pid=dead)
            elif self.writer is not None and dead == self.writer.pid:
                if why := self.writer.ended(status):
                    self.send("without_writer", why=why)
                else:
                    self.poll.register(self.writer.listener.fileno(), select.POLLIN)
            elif dead == self.template_pid:
                self.template_pid = 0
                why = describe_status(status)
                self.send("template_ended", why=why)
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
            self.send("refused", group=group.name, why=f"a parked process {describe_status(status)}")
            return
        if group.ended:  # this was the store that it kept
            self.drop(group)
        self.send("exited", group=group.name, local_rank=rank, pid=pid, status=status, at=at)
        if group.stopped and not group.failed:
            self.end_by_signal(group, [left for left in self.leftovers() if session_of(left) == pid])

    def finish(self, group: OwnedGroup) -> None:
        """End a group whose last worker has exited: its store, unless kept, and what its workers left behind.

        Processes that survive SIGKILL are waited for until a deadline, then reported, and reaped whenever they end.
        """
        now = time.monotonic()
        if group.saving is not None and now >= group.save_until:
            waited_s = now - group.saving_since
            self.send("unsaved", group=group.name, ranks=group.unsaved or len(group.workers()), seconds=waited_s)
            self.saved(group)
        if not group.is_ending():
            return
        keeps_store = group.store_outlives()
        if not keeps_store:
            self.kill_members(group)
        leftovers = self.leftovers()
        if leftovers and any(other.is_parked() for other in self.groups.values()):
            return  # some of them may be that group's members, which the template reports in a moment
        if leftovers:
            self.end_leftovers(group, leftovers, now)
        members_left = bool(group.alive) and not keeps_store
        if members_left and group.members_may_die(now):
            return
        if leftovers and group.leftovers_may_die(now):
            return
        self.group_ended(group, keeps_store, leftovers)

    def end_leftovers(self, group: OwnedGroup, leftovers: list[int], now: float) -> None:
        """After a success SIGTERM and a grace period come first. Cleaners of shared memory get a moment in any case."""
        if group.leftovers_since is None:
            group.leftovers_since = now
        if not group.failed:
            self.end_by_signal(group, leftovers)
        waited_s = now - max(group.leftovers_since, group.last_exit_at)
        if group.failed or waited_s > group.leftover_grace_s():
            for pid in leftovers:
                if waited_s > CLEANER_GRACE_S or not may_be_cleaner(pid):
                    signal_child(pid, signal.SIGKILL)

    def end_by_signal(self, group: OwnedGroup, leftovers: list[int]) -> None:
        """Once each."""
        for pid in set(leftovers) - group.asked:
            signal_child(pid, signal.SIGTERM)
        group.asked.update(leftovers)

    def group_ended(self, group: OwnedGroup, keeps_store: bool, leftovers: list[int]) -> None:
        survivors = [*leftovers, *([] if keeps_store else group.alive)]
        unkillable = group.describe_unkillable(survivors)
        self.unkillable.update(survivors)
        group.ended = True
        if not keeps_store:
            group.alive.clear()
            self.drop(group)
        self.send("ended", group=group.name, unkillable=unkillable)

    def leftovers(self) -> list[int]:
        """Our children that are neither the template nor in a group: orphans of ended workers."""
        writer = self.writer.pid if self.writer is not None else 0
        known = {
            self.template_pid,
            writer,
            *self.unkillable,
            *(pid for group in self.groups.values() for pid in group.alive),
        }
        return [pid for pid in children() if pid not in known]

    def end_everything(self) -> None:
        """Kill every descendant: each death makes more of them our children, until none is left. Bounded."""
        if self.writer is not None:
            for group in list(self.groups.values()):
                self.drop(group)
            self.writer.end()
        end_children(2 * LEFTOVER_GRACE_S, except_pids=self.unkillable)
        with contextlib.suppress(RecursionError):  # the agent removes what a job has nested that deeply
            shutil.rmtree(self.runtime_dir, ignore_errors=True)


def receive(connection: socket.socket) -> Message:
    """An answer of the writer, {} if it has ended."""
    try:
        answer: Message = json.loads(connection.recv(PACKET) or b"{}")
    except OSError:
        return {}
    return answer


def main() -> None:
    fd, runtime_dir = int(sys.argv[1]), sys.argv[2]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"elasticd-owner")
    take_signals(IGNORED_SIGNALS, ignore_signal)  # only the agent's end of file ends this process
    agent = socket.socket(fileno=fd)
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    for ours in (fd, *map(int, sys.argv[3:])):
        os.set_inheritable(ours, False)
    Owner(agent, runtime_dir).run()


if __name__ == "__main__":
    main()

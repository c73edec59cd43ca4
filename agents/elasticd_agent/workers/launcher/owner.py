"""The owner: the parent of every process that a job runs on one node, and the process that ends them all.

**Invariant.** When a group has ended, no process of it is left; when the agent or the owner has died, no process of
the job is left. Only processes that the kernel cannot kill are excepted, and they are reported. Nothing else on a node
can keep this: PDEATHSIG reaches a direct child only, a daemonised grandchild goes to init, where nothing tells whose
it was, and a mark in the environment is lost, since the /proc/PID/environ of a forked worker is its template's.

Each process is covered by one of these:

    worker, store, writer   are children of the owner, which reaps them and reports their exits
    what a worker starts    becomes a child of the owner, a child subreaper, when its parent ends: `advance_group_end`
    the agent dies          its socket reads end of file: `end_everything` kills child after child until none is left
    the owner dies          PDEATHSIG ends template, workers, store and writer; the agent, a subreaper as well, ends
                            what these leave behind, and starts another owner
    the template dies       workers that run are not its children; those that are parked read end of file and exit
    a worker is kept        it is in no group, but still a child: see `end_kept`, and PDEATHSIG stays armed
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

7. A worker whose script can enter another round in its process (it says Entered) is kept if the agent wants it: it is
   asked to leave (Unwind), destroys its process groups, and waits for a release like one that the template has forked
   (AtEntry). Only then it leaves its group, so "the group has ended" means that each member is dead or parked, and no
   rank is in two rounds. One that is not parked in time gets SIGKILL. The others get that at once, and the store when
   nobody is asked any more: who leaves may use it. A release takes kept processes over by pid, and ends all others.
8. What a kept worker has left behind in its session runs on with it, and is killed when it is reaped.

The owner decides nothing about the job: what the death of a rank means is the agent's concern. Processes that survive
SIGKILL are waited for until a deadline and then reported with `ended`; `reaped` follows when one of them ends after
all.

It runs as `python -I -S owner.py FD RUNTIME_DIR PATHS [KEPT_FD ...]`, in one thread, with the standard library and a
few modules of ours that need no more; PATHS are where our packages are. Each KEPT_FD stays open as long as there is a
process to end: a lock on it shows that. `messages.py` has the requests that it takes, and its reports.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

if __name__ == "__main__":  # run as a file, isolated: our own packages come after the standard library
    sys.path += sys.argv[3].split(os.pathsep)

from elasticd import channel
from elasticd_agent.system.processes.process import (
    IGNORED_SIGNALS,
    LEFTOVER_GRACE_S,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    children,
    describe_wait_status,
    end_children,
    handle_signals_unless_ignored,
    ignore_signal,
    is_shell,
    may_be_cleaner,
    prctl,
    program_of,
    session_of,
    signal_child,
    spawn,
)
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.cpu_binding import bind_to_cpus
from elasticd_agent.workers.launcher.messages import STORE_RANK
from elasticd_agent.workers.launcher.owned_group import OwnedGroup
from elasticd_agent.workers.launcher.writer_process import SaveAtFault, WriterProcess

ORPHANS_END_S = 0.5
"""The time after a success in which helpers of Python and torch end by themselves, as their pipes have closed."""


class Owner:
    """One loop over its sockets and SIGCHLD."""

    def __init__(self, agent: socket.socket, runtime_dir: str) -> None:
        self.agent = agent
        self.runtime_dir = runtime_dir
        self.groups: dict[int, OwnedGroup] = {}
        self.template: socket.socket | None = None
        self.template_pid = 0
        self.writer: WriterProcess | None = None
        self.flushed_again = False
        self.flushing: tuple[SaveAtFault, messages.Flush] | None = None
        """The save of what kept processes hold, ahead of a flush."""
        self.kept: dict[int, socket.socket] = {}
        """Processes that have left their group and wait at their entry for a release: pid -> our end of its channel."""
        self.holding: set[int] = set()
        """Those that hold a state, until they train again: they can do nothing but meet, or be killed."""
        self.surplus: set[int] = set()
        """Those that were killed there, or have closed the channel, and are not reaped yet."""
        self.early_exits: dict[int, tuple[int, float]] = {}
        """Exits of children that the template has not reported yet: pid -> status, time."""
        self.unkillable: set[int] = set()
        """Processes that survive SIGKILL and whose groups have ended."""
        self.running = True
        self.handlers: dict[type, Callable[[Any], None]] = {
            messages.HoldStates: self.hold_states,
            messages.StartTemplate: self.start_template,
            messages.EndTemplate: self.end_template,
            messages.Park: self.park,
            messages.Release: self.release,
            messages.ReleaseAhead: self.release_ahead,
            messages.ReleaseHeld: self.release_held,
            messages.EndKept: self.end_kept,
            messages.Execute: self.execute,
            messages.Signal: self.signal,
            messages.Flush: self.flush,
        }
        self.poll = select.poll()
        self.watched: dict[int, Callable[[], object]] = {}
        """The function to call when a descriptor is readable."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.watch(read, lambda: os.read(read, 4096))
        self.watch(agent.fileno(), self.receive_from_agent)

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        self.watched[fd] = call
        self.poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.watched[fd]

    def report(self, report: messages.Report) -> None:
        self.send(messages.to_message(report))

    def send(self, message: channel.Message) -> None:
        try:
            channel.send(self.agent, message)
        except OSError:
            self.running = False  # the agent has died; the loop ends everything

    def run(self) -> None:
        try:
            self.serve()
        finally:  # an error in this program, too, leaves no process behind
            self.end_everything()

    def serve(self) -> None:
        while self.running:
            waiting = self.flushing or any(
                g.workers_ended_or_killed() or g.saving or g.in_doubt for g in self.groups.values()
            )
            for fd, _ in self.poll.poll(50 if waiting else None):
                if fd in self.watched:  # not closed by what this turn has read before
                    with contextlib.suppress(BlockingIOError):  # there is nothing to read after all
                        self.watched[fd]()
            self.reap()
            for group in list(self.groups.values()):
                self.advance_group_end(group)
            if self.flushing is not None and self.flushing[0].is_late(time.monotonic()):
                self.kept_states_saved()

    def receive_from_agent(self) -> None:
        message = channel.receive(self.agent)
        if message is None:
            self.running = False
            return
        try:
            request = messages.decode_request(message)
            if request is None:  # an agent that is one minor version newer may send requests unknown here
                raise OSError("this launcher is older and cannot do that")
            self.handlers[type(request)](request)
        except OSError as error:
            group = self.groups.get(message.get("group", 0))
            if group is not None and not group.running:
                self.kill_and_forget(group)
            self.report(messages.Refused(f"{message['type']}: {error}", message.get("group")))

    # --- the writer ---------------------------------------------------------------------------------------------

    def hold_states(self, request: messages.HoldStates) -> None:
        try:
            self.writer = WriterProcess(request.argv, request.env, self.runtime_dir)
        except OSError as error:
            self.report(messages.WithoutWriter(str(error)))
            return
        self.await_first_rank(self.writer)

    def await_first_rank(self, writer: WriterProcess) -> None:
        self.watch(writer.listener.fileno(), lambda: self.start_writer(writer))

    def start_writer(self, writer: WriterProcess) -> None:
        self.unwatch(writer.listener.fileno())  # the writer itself listens until it ends
        if why := writer.start():
            self.report(messages.WithoutWriter(why))

    def writer_ended(self, writer: WriterProcess, status: int) -> None:
        if why := writer.handle_exit(status):
            self.report(messages.WithoutWriter(why))
        else:
            self.await_first_rank(writer)

    def flush(self, request: messages.Flush) -> None:
        if self.kept and request.held and self.writer is not None:
            saving = self.writer.request_save(request.held, signal.SIGKILL, 0.0)
            if saving is not None:
                self.flushing = saving, request
                self.watch(saving.connection.fileno(), lambda: self.kept_states_saved(saving.receive_report()))
                return
        self.end_kept(messages.EndKept([]))
        self.request_writes(request)

    def kept_states_saved(self, is_over: bool = True) -> None:
        """The kept processes have saved what they hold, or had the time for it."""
        if self.flushing is not None and is_over:
            (saving, request), self.flushing = self.flushing, None
            self.unwatch(saving.connection.fileno())
            saving.connection.close()
            self.flush(request._replace(held=0))

    def request_writes(self, request: messages.Flush) -> None:
        writer = self.writer
        connection = None if writer is None else writer.request_flush()
        if writer is None or connection is None:
            self.report(messages.Flushed())
            return
        self.report(messages.Flushing(writer.held_bytes()))
        self.watch(connection.fileno(), lambda: self.receive_flush_answer(connection, request))

    def receive_flush_answer(self, connection: socket.socket, request: messages.Flush) -> None:
        answer = channel.receive(connection)
        self.unwatch(connection.fileno())
        connection.close()
        if not answer and not self.flushed_again:  # it has died, and another one finds the same states
            self.flushed_again = True
            self.request_writes(request)
        else:
            self.report(channel.to_named_tuple(messages.Flushed, answer or {}))

    # --- the template -------------------------------------------------------------------------------------------

    def start_template(self, request: messages.StartTemplate) -> None:
        try:
            self.spawn_template(request)
        except OSError as error:  # no memory, or too many processes
            self.report(messages.TemplateEnded(f"could not be started: {error.strerror or error}"))

    def spawn_template(self, request: messages.StartTemplate) -> None:
        ours, theirs = channel.pair()
        launch = {**request.launch, "fd": theirs.fileno(), "owner": os.getpid(), "signals": IGNORED_SIGNALS}
        env = {**request.env, "ELASTICD_LAUNCH": json.dumps(launch)}
        os.set_inheritable(theirs.fileno(), True)
        self.template_pid = spawn(request.argv, env, request.cwd, None, None)
        theirs.close()
        self.template = ours
        self.watch(ours.fileno(), lambda: self.receive_from_template(ours))

    def end_template(self, request: messages.EndTemplate) -> None:
        if self.template_pid:
            signal_child(self.template_pid, signal.SIGKILL)

    def receive_from_template(self, template: socket.socket) -> None:
        message = channel.receive(template)
        if message is None:
            self.template_lost("closed its socket")
        elif message["type"] == "Forked":
            self.adopt(message["group"], message["pids"])
        else:
            if message["type"] == "Refused" and message["group"] in self.groups:
                self.kill_and_forget(self.groups[message["group"]])
            self.send(message)

    def template_lost(self, why: str) -> None:
        if self.template is not None:
            self.unwatch(self.template.fileno())
            self.template.close()
            self.template = None
        for group in list(self.groups.values()):
            if group.is_being_forked():
                self.kill_and_forget(group)
                self.report(messages.Refused(f"the template ended: {why}", group.name))
        if self.template_pid:
            signal_child(self.template_pid, signal.SIGKILL)
            self.report(messages.TemplateEnded(why))
            self.template_pid = 0

    # --- groups -------------------------------------------------------------------------------------------------

    def park(self, request: messages.Park) -> None:
        if self.template is None:
            raise OSError("there is no template")
        ours, theirs = {}, []
        for rank in [*[STORE_RANK] * request.store, *range(request.workers)]:
            ours[rank], end_for_child = channel.pair()
            theirs.append(end_for_child)
        group = OwnedGroup(request.group, ours)
        if request.store and request.port == 0:
            self.send_store_listener(group, request.host, 0)
        self.groups[group.name] = group
        fork = {"fork": group.name, "store": request.store}
        channel.send(self.template, fork, *(end_for_child.fileno() for end_for_child in theirs))
        for end_for_child in theirs:
            end_for_child.close()

    def adopt(self, name: int, pids: list[int]) -> None:
        """The template has forked these processes, and its intermediate has ended: they are ours."""
        group = self.groups.get(name)
        if group is None:  # it was dropped meanwhile
            for pid in pids:
                signal_child(pid, signal.SIGKILL)
            return
        group.alive = dict(zip(pids, group.channels, strict=True))
        self.report(messages.Parked(name, pids))
        for pid in pids:
            status, at = self.early_exits.pop(pid, (0, 0.0))
            if at > group.since:  # otherwise an earlier process had that pid
                self.member_exited(group, pid, status, at)

    def release(self, request: messages.Release) -> None:
        self.reap()  # a kept process that has died meanwhile is replaced
        group = self.groups.get(request.group)
        if group is None or not group.alive:
            raise OSError("there is no such parked group")
        if request.store:
            if group.port == 0:
                self.send_store_listener(group, request.host, request.port)
            self.report_store_port(group)
        else:
            group.port = 0  # the surplus store ends below
        for rank, worker in enumerate(request.workers):
            group.held_releases[rank] = {**worker, "env": self.with_master_port(group, worker["env"])}
        taken = {rank: pid for rank, pid in enumerate(request.kept) if pid in self.kept}
        for pid, rank in list(group.alive.items()):
            if rank >= len(request.workers) or rank in taken or (rank == STORE_RANK and not request.store):
                del group.alive[pid]
                signal_child(pid, signal.SIGKILL)
        for rank in group.channels.keys() - group.alive.values():
            group.channels.pop(rank).close()
        for rank, pid in taken.items():
            group.alive[pid], group.channels[rank] = rank, self.kept.pop(pid)
        for pid, rank in group.alive.items():
            if rank != STORE_RANK and rank not in taken:
                self.watch_worker(pid, group.channels[rank])
        self.release_workers(group, group.held_releases.keys() - set(request.held_ranks))
        self.report_started(group, request.keep)

    def release_held(self, request: messages.ReleaseHeld) -> None:
        group = self.groups.get(request.group)
        if group is not None:
            self.release_workers(group, request.ranks)
            self.report(messages.Released(group.name, request.ranks))

    def release_workers(self, group: OwnedGroup, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError, KeyError):  # one that died while parked exits like any other
                channel.send(group.channels[rank], group.held_releases.pop(rank))

    def release_ahead(self, request: messages.ReleaseAhead) -> None:
        group = self.groups.get(request.group)
        if group is None or not group.alive:
            raise OSError("there is no such parked group")
        processes = {rank: pid for pid, rank in group.alive.items()}
        pids = [processes[rank] for rank in range(len(request.workers))]
        for rank, (pid, worker) in enumerate(zip(pids, request.workers, strict=True)):
            del group.alive[pid]
            self.kept[pid] = group.channels.pop(rank)
            self.watch_worker(pid, self.kept[pid])
            with contextlib.suppress(OSError):
                channel.send(self.kept[pid], {**worker})
        self.kill_and_forget(group)
        self.report(messages.ReleasedAhead(group.name, pids))

    # --- processes that are kept --------------------------------------------------------------------------------

    def watch_worker(self, pid: int, end: socket.socket) -> None:
        self.watch(end.fileno(), lambda: self.receive_from_worker(pid, end))

    def receive_from_worker(self, pid: int, end: socket.socket) -> None:
        """A worker that ends its channel, or sends what nobody can read, is not kept any more."""
        message: channel.Message = {}
        with contextlib.suppress(ValueError, RecursionError):
            message = channel.receive(end, socket.MSG_DONTWAIT) or {}
        kind = message.get("type")
        group = self.group_of(pid)
        if group is None:
            if kind == messages.AtEntry.__name__:
                self.report(messages.Waits(pid))
            else:
                self.end_kept(messages.EndKept([other for other in self.kept if other != pid]))
            return
        rank = group.alive[pid]
        if kind == messages.Entered.__name__:
            group.entered.add(rank)
            self.holding.discard(pid)
            self.report(messages.Entered(group.name, rank))
        elif kind == messages.Left.__name__:
            group.entered.discard(rank)
            self.report(messages.Left(group.name, rank))
            group.unwinding.pop(pid, None)  # it was asked a moment later
        elif kind == messages.LostPeer.__name__ and rank in group.entered:
            report = str(message.get("report"))
            group.in_doubt[rank] = time.monotonic()
            self.report(messages.RankLostPeer(group.name, rank, report, time.monotonic()))
        elif kind == messages.AtEntry.__name__ and pid in group.unwinding:
            del group.alive[pid], group.unwinding[pid]
            group.kept.append(rank)
            group.is_held |= message.get("holds", 0) >= group.held_step > 0
            self.kept[pid] = group.channels.pop(rank)
            if message.get("holds"):
                self.holding.add(pid)
        else:
            group.entered.discard(rank)
            self.close_channel(group.channels.pop(rank))

    def group_of(self, pid: int) -> OwnedGroup | None:
        return next((group for group in self.groups.values() if pid in group.alive), None)

    def close_channel(self, end: socket.socket) -> None:
        if end.fileno() in self.watched:
            self.unwatch(end.fileno())
        end.close()

    def ask_to_leave(self, group: OwnedGroup) -> None:
        """Ask the workers that are to keep their process to leave the round."""
        group.unwound_at = group.looked_at = time.monotonic()
        for pid in group.staying_pids():
            rank = group.alive[pid]
            with contextlib.suppress(OSError):
                channel.send(group.channels[rank], messages.to_message(messages.Unwind(group.end.why)))
                group.unwinding[pid] = rank

    def end_kept(self, request: messages.EndKept) -> None:
        only = set(request.only or self.kept)
        for pid in only.intersection(self.kept) - set(request.except_pids):
            self.close_channel(self.kept.pop(pid))
            self.surplus.add(pid)
            signal_child(pid, signal.SIGKILL)

    def kept_exited(self, pid: int, status: int) -> None:
        """A process ends with its orphans; the next group's end reaches what these have started."""
        self.surplus.discard(pid)
        if pid in self.kept:
            self.close_channel(self.kept.pop(pid))
        self.report(messages.KeptExited(pid, status))
        for left in self.leftover_pids():
            if session_of(left) == pid and not may_be_cleaner(left):
                signal_child(left, signal.SIGKILL)

    def execute(self, request: messages.Execute) -> None:
        self.end_kept(messages.EndKept([]))
        group = self.groups[request.group] = OwnedGroup(request.group, {})
        if request.store is not None:
            self.exec_store(group, request.store["argv"], request)
        for rank, worker in enumerate(request.workers):
            env = {**request.env, **request.workers_env, **self.with_master_port(group, worker["env"])}
            bind = functools.partial(bind_to_cpus, worker.get("cpus", ()))
            argv = worker["argv"] or request.argv
            group.alive[spawn(argv, env, request.cwd, worker["stdout"], worker["stderr"], (), bind)] = rank
        self.report_started(group, request.keep)

    def report_started(self, group: OwnedGroup, keeps_store: bool) -> None:
        group.running, group.keeps_store, group.ranks = True, keeps_store, dict(group.alive)
        group.running_since = time.monotonic()
        pids = {rank: pid for pid, rank in group.alive.items()}
        store = pids.pop(STORE_RANK, 0)
        self.report(messages.Started(group.name, [pids[rank] for rank in sorted(pids)], store))

    # --- the round's store --------------------------------------------------------------------------------------

    def send_store_listener(self, group: OwnedGroup, host: str, port: int) -> None:
        with open_listener(host, port) as listener:
            group.port = listener.getsockname()[1]
            channel.send(group.channels[STORE_RANK], {"host": host}, listener.fileno())

    def exec_store(self, group: OwnedGroup, argv: list[str], request: messages.Execute) -> None:
        group.channels[STORE_RANK], theirs = channel.pair()
        with theirs, open_listener(request.host, request.port) as listener:
            group.port = listener.getsockname()[1]
            for fd in (listener.fileno(), theirs.fileno()):
                os.set_inheritable(fd, True)
            argv = [*argv, request.host, str(listener.fileno()), str(theirs.fileno())]
            group.alive[spawn(argv, request.env, request.cwd, None, None, IGNORED_SIGNALS)] = STORE_RANK
        self.report_store_port(group)

    def report_store_port(self, group: OwnedGroup) -> None:
        """Before a worker runs: the socket accepts already, and other nodes' workers need the port as soon as ours."""
        self.report(messages.StoreListens(group.name, group.port))

    def with_master_port(self, group: OwnedGroup, env: dict[str, str]) -> dict[str, str]:
        """The environment with the port of the group's own store, if it has one."""
        return {**env, "MASTER_PORT": str(group.port)} if group.port else env

    # --- signals ------------------------------------------------------------------------------------------------

    def signal(self, request: messages.Signal) -> None:
        group = self.groups.get(request.group)
        if group is None:
            return
        group.in_doubt.clear()
        if request.signal == signal.SIGKILL:
            group.failed, group.end = True, request
            if not request.keep:
                group.unwinding.clear()
            if not group.running or group.ended:
                self.kill_and_forget(group)
                return
        stay = group.staying_pids() if request.signal == signal.SIGKILL else []
        if request.save is None or not self.start_save_at_fault(group, request.save, request.signal, stay):
            self.signal_members(group, request.signal)

    def signal_members(self, group: OwnedGroup, signum: int) -> None:
        if signum == signal.SIGKILL:
            self.kill_members(group)
        else:
            group.stopped = True
            group.runs_programs |= any(map(is_shell, group.worker_pids()))
            for pid in group.worker_pids():
                signal_child(pid, signal.SIGKILL if pid in self.holding else signum)

    def start_save_at_fault(self, group: OwnedGroup, round: int, signum: int, stay: Sequence[int] = ()) -> bool:
        """Have the group's workers save their state, or those that `stay` hold it; the signal follows. False if none
        can save.
        """
        if group.saving is None and self.writer is not None and group.worker_pids():
            group.saving = self.writer.request_save(round, signum, group.running_since, stay)
            if group.saving is not None:
                self.watch(group.saving.connection.fileno(), functools.partial(self.receive_from_donors, group))
        if group.saving is not None and signum == signal.SIGKILL:
            group.saving.signum = signum
        return group.saving is not None

    def receive_from_donors(self, group: OwnedGroup) -> None:
        saving = group.saving
        if saving is None or not saving.receive_report():
            return
        group.held_step = max(saving.held, group.held_step)
        if saving.is_of_stayers and not (saving.held or saving.saved) and group.end.save is not None:
            self.close_saving(group)
            if self.start_save_at_fault(group, group.end.save, saving.signum):
                return
        self.signal_after_saving(group, saving.signum)

    def signal_after_saving(self, group: OwnedGroup, signum: int) -> None:
        """The workers have saved their state, or had the time for it."""
        self.close_saving(group)
        self.signal_members(group, signum)

    def close_saving(self, group: OwnedGroup) -> None:
        if group.saving is not None:
            self.unwatch(group.saving.connection.fileno())
            group.saving.connection.close()
            group.saving = None

    def kill_members(self, group: OwnedGroup) -> None:
        """All but those that are asked to leave the round; these may use the store until they have."""
        self.close_saving(group)
        if group.killed_at is None:
            self.ask_to_leave(group)
            group.note_kill(time.monotonic())
        for pid, rank in group.alive.items():
            if pid not in group.unwinding and not (group.unwinding and rank == STORE_RANK):
                signal_child(pid, signal.SIGKILL)

    def kill_and_forget(self, group: OwnedGroup) -> None:
        self.close_saving(group)
        for end in group.channels.values():
            self.close_channel(end)
        for pid in group.alive:
            signal_child(pid, signal.SIGKILL)
        self.groups.pop(group.name, None)

    # --- deaths -------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect every child that ended. Its own children become ours: see `advance_group_end`."""
        while True:
            try:
                dead, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not dead:
                return
            now = time.monotonic()
            self.holding.discard(dead)
            group = self.group_of(dead)
            if group is not None:
                self.member_exited(group, dead, status, now)
            elif dead in self.kept or dead in self.surplus:
                self.kept_exited(dead, status)
            elif dead in self.unkillable:
                self.unkillable.discard(dead)
                self.report(messages.Reaped(dead))
            elif self.writer is not None and dead == self.writer.pid:
                self.writer_ended(self.writer, status)
            elif dead == self.template_pid:
                self.template_pid = 0
                why = describe_wait_status(status)
                self.report(messages.TemplateEnded(why))
                self.template_lost(why)
            else:
                self.early_exits[dead] = (status, now)
                while len(self.early_exits) > 1024:
                    self.early_exits.pop(next(iter(self.early_exits)))

    def member_exited(self, group: OwnedGroup, pid: int, status: int, at: float) -> None:
        rank = group.alive.pop(pid)
        group.unwinding.pop(pid, None)
        group.in_doubt.clear()
        group.last_exit_at = at
        if not group.running:
            self.kill_and_forget(group)
            self.report(messages.Refused(f"a parked process {describe_wait_status(status)}", group.name))
            return
        if group.ended:  # this was the store that it kept
            self.kill_and_forget(group)
        elif rank != STORE_RANK and rank in group.channels:
            self.close_channel(group.channels.pop(rank))
        self.report(messages.Exited(group.name, rank, pid, status, at))
        if group.stopped and not group.failed:
            self.send_sigterm_once(group, [left for left in self.leftover_pids() if session_of(left) == pid])

    def advance_group_end(self, group: OwnedGroup) -> None:
        """End a group whose last worker has exited: its store, unless kept, and what its workers left behind.

        Processes that survive SIGKILL are waited for until a deadline, then reported, and reaped whenever they end.
        """
        now = time.monotonic()
        for rank in group.ranks_to_tell_no_fault(now):
            del group.in_doubt[rank]
            with contextlib.suppress(OSError, KeyError):
                channel.send(group.channels[rank], messages.to_message(messages.NoFault()))
        if (saving := group.saving) is not None and saving.is_late(now):
            self.report(messages.Unsaved(group.name, saving.unsaved or len(group.worker_pids()), now - saving.since))
            self.signal_after_saving(group, saving.signum)
        if group.is_late_at_entry(now):
            late, group.unwinding = sorted(group.unwinding.values()), {}
            self.report(messages.NotParked(group.name, late, now - group.unwound_at))
            if group.held_step and not group.is_held and group.end.save is not None:
                self.start_save_at_fault(group, group.end.save, signal.SIGKILL)
            group.note_kill(now)
        if not group.workers_ended_or_killed() or group.saving is not None:
            return
        keeps_store = group.store_outlives_workers()
        if not keeps_store:
            self.kill_members(group)
        leftovers = self.leftover_pids()
        if leftovers and any(other.is_being_forked() for other in self.groups.values()):
            return  # some of them may be that group's members, which the template reports in a moment
        if leftovers:
            self.end_leftovers(group, leftovers, now)
        members_left = bool(group.alive) and not keeps_store
        may_die = (members_left and group.awaits_member_deaths(now)) or (
            leftovers and group.awaits_leftover_deaths(now)
        )
        if not may_die:
            self.report_group_ended(group, keeps_store, leftovers)

    def end_leftovers(self, group: OwnedGroup, leftovers: list[int], now: float) -> None:
        """Kill what workers have left behind. After a success it has a moment to end by itself, SIGTERM, and a grace
        period. Cleaners of shared memory have a moment in any case."""
        if group.leftovers_since is None:
            group.leftovers_since = now
        waited_s = now - max(group.leftovers_since, group.last_exit_at)
        if not group.failed and (group.stopped or waited_s > ORPHANS_END_S):
            self.send_sigterm_once(group, leftovers)
        if group.failed or waited_s > group.leftover_grace_s():
            for pid in leftovers:
                if waited_s > LEFTOVER_GRACE_S or not may_be_cleaner(pid):
                    signal_child(pid, signal.SIGKILL)

    def send_sigterm_once(self, group: OwnedGroup, leftovers: list[int]) -> None:
        """Send SIGTERM to those that did not get it yet. Cleaners of shared memory free it, and end by themselves."""
        for pid in set(leftovers) - group.asked:
            if not may_be_cleaner(pid):
                if not group.stopped and (program := program_of(pid)):
                    group.left_behind.append(f"{program} (pid {pid})")
                signal_child(pid, signal.SIGTERM)
                group.asked.add(pid)

    def report_group_ended(self, group: OwnedGroup, keeps_store: bool, leftovers: list[int]) -> None:
        survivors = [*leftovers, *([] if keeps_store else group.alive)]
        unkillable = group.describe_unkillable(survivors)
        self.unkillable.update(survivors)
        group.ended = True
        if not keeps_store:
            group.alive.clear()
            self.kill_and_forget(group)
        self.report(messages.Ended(group.name, unkillable, sorted(group.kept), group.left_behind))

    def leftover_pids(self) -> list[int]:
        """Our children that are neither template nor writer nor in a group: orphans of ended workers, not of kept
        ones."""
        kept = set(self.kept).union(*(group.unwinding for group in self.groups.values()))
        known = {self.template_pid, *self.unkillable, *kept}.union(*(group.alive for group in self.groups.values()))
        if self.writer is not None:
            known.add(self.writer.pid)
        return [pid for pid in children() if pid not in known and not (kept and session_of(pid) in kept)]

    def end_everything(self) -> None:
        """Kill every descendant: each death makes more of them our children, until none is left. Bounded."""
        if self.writer is not None:
            for group in list(self.groups.values()):
                self.kill_and_forget(group)
            self.end_kept(messages.EndKept([]))
            self.writer.end_process()
        end_children(2 * LEFTOVER_GRACE_S, except_pids=self.unkillable)
        with contextlib.suppress(RecursionError):  # the agent removes what a job has nested that deeply
            shutil.rmtree(self.runtime_dir, ignore_errors=True)


def open_listener(host: str, port: int) -> socket.socket:
    """A socket for a round's store; clients wait in its backlog. "::" is every address, IPv4 too."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=is_ipv6)


def main() -> None:
    fd, runtime_dir = int(sys.argv[1]), sys.argv[2]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"elasticd-owner")
    handle_signals_unless_ignored(IGNORED_SIGNALS, ignore_signal)  # only the agent's end of file ends this process
    agent = socket.socket(fileno=fd)
    channel.allow_large_messages(agent)
    for ours in (fd, *map(int, sys.argv[4:])):
        os.set_inheritable(ours, False)
    Owner(agent, runtime_dir).run()


if __name__ == "__main__":
    main()

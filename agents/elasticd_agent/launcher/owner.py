"""The owner: the parent of every process a job runs on this node, and the one who ends them all.

It exists so that no death leaves anything behind. It is a child subreaper, so whatever a worker starts, daemonised or
not, becomes its child in the end; when the agent dies it sees the end of file on its socket and kills every descendant
it has; when it dies itself, PDEATHSIG ends the template, the workers and the store. It decides nothing: it starts,
releases, signals and reaps what the agent names, and says what happened.

Runs as `python -I -S owner.py FD RUNTIME_DIR`: one file, standard library only, one thread.

Messages are one JSON object a packet. From the agent ("do"): template, park, release, exec, signal, end_template.
To the agent ("is"): template_ready, template_gone, parked, refused, started, exited, gone.
"""

from __future__ import annotations

import ctypes
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

PACKET = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NAME = 1, 36, 15
STORE = -1
"""The local rank under which the round's store process is known."""
LEFTOVER_GRACE_S = 5.0
"""What a successful script left running may take to end by itself; the same bound holds for a SIGKILL to be obeyed."""
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
CLEANER_GRACE_S = 1.0
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Processes that give back their parents' shared memory once these are dead, in milliseconds, and then end; killed
together with them they would leave it behind."""

Message = dict[str, Any]


class Group:
    """The workers and the store of one group: first parked, then running, then gone."""

    def __init__(self, name: int, channels: dict[int, socket.socket], port: int) -> None:
        self.name = name
        self.channels = channels  # local rank -> our end; the store's stays open: its end of file ends the store
        self.port = port
        self.alive: dict[int, int] = {}  # pid -> local rank
        self.running = False
        self.failed = False
        self.leftovers_since: float | None = None

    def workers(self) -> list[int]:
        return [pid for pid, rank in self.alive.items() if rank != STORE]


def prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    return ours, theirs


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(4096)
    return listener


class Owner:
    """One loop over the agent's socket, the template's socket and SIGCHLD."""

    def __init__(self, agent: socket.socket, runtime_dir: str) -> None:
        self.agent = agent
        self.runtime_dir = runtime_dir
        self.groups: dict[int, Group] = {}
        self.template: socket.socket | None = None
        self.template_pid = 0
        self.early: dict[int, tuple[int, float]] = {}  # exits of children we have not been told of yet
        self.listeners: dict[int, socket.socket] = {}
        self.running = True
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.wakeup = read
        self.poll = select.poll()
        for fd in (self.agent.fileno(), read):
            self.poll.register(fd, select.POLLIN)

    def say(self, **message: Any) -> None:
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
            waiting = any(group.running and not group.workers() for group in self.groups.values())
            for fd, _ in self.poll.poll(50 if waiting else None):
                if fd == self.wakeup:
                    os.read(fd, 4096)
                elif fd == self.agent.fileno():
                    self.hear_agent()
                elif self.template is not None and fd == self.template.fileno():
                    self.hear_template()
            self.reap()
            for group in list(self.groups.values()):
                self.finish(group)

    def hear_agent(self) -> None:
        try:
            packet = self.agent.recv(PACKET)
        except OSError:  # a reset, not an end of file, when the agent died with words of ours unread
            packet = b""
        if not packet:
            self.running = False
            return
        message = json.loads(packet)
        verb: Callable[[Message], None] = getattr(self, "do_" + message["do"])
        try:
            verb(message)
        except OSError as error:
            self.say(**{"is": "refused", "group": message.get("group"), "why": f"{message['do']}: {error}"})

    # --- the template -------------------------------------------------------------------------------------------

    def do_template(self, message: Message) -> None:
        """Start the template: {argv, env, cwd, launch}; `launch` reaches the start-up hook through the environment."""
        ours, theirs = pair()
        launch = {**message["launch"], "fd": theirs.fileno(), "owner": os.getpid()}
        env = {**message["env"], "ELASTICD_LAUNCH": json.dumps(launch)}
        os.set_inheritable(theirs.fileno(), True)
        self.template_pid = self.spawn(message["argv"], env, message["cwd"], None, None)
        theirs.close()
        self.template = ours
        self.poll.register(ours.fileno(), select.POLLIN)

    def do_end_template(self, message: Message) -> None:
        if self.template_pid:
            end(self.template_pid, signal.SIGKILL)

    def hear_template(self) -> None:
        assert self.template is not None
        try:
            packet = self.template.recv(PACKET)
        except OSError:
            packet = b""
        if not packet:
            self.forget_template("it closed its socket")
            return
        message = json.loads(packet)
        if message["is"] == "forked":
            self.adopt(message)
            return
        if message["is"] == "refused" and message["group"] in self.groups:
            self.drop(self.groups[message["group"]])
        self.say(**message)

    def forget_template(self, why: str) -> None:
        if self.template is not None:
            self.poll.unregister(self.template.fileno())
            self.template.close()
            self.template = None
        for group in list(self.groups.values()):
            if not group.running and not group.alive:  # asked for, never forked
                self.drop(group)
                self.say(**{"is": "refused", "group": group.name, "why": f"the template ended: {why}"})
        if self.template_pid:
            end(self.template_pid, signal.SIGKILL)
            self.say(**{"is": "template_gone", "why": why})
            self.template_pid = 0

    # --- groups -------------------------------------------------------------------------------------------------

    def do_park(self, message: Message) -> None:
        """Fork a group that waits: {group, workers, host, port}; port 0: its store starts at once, else at release."""
        name, ranks = message["group"], [STORE, *range(message["workers"])]
        if self.template is None:
            raise OSError("there is no template")
        ours, theirs = {}, []
        for rank in ranks:
            ours[rank], end_for_child = pair()
            theirs.append(end_for_child)
        group = Group(name, ours, 0)
        if message["port"] == 0:
            self.give_store_its_port(group, message["host"], 0)
        self.groups[name] = group
        request = encode({"fork": name, "workers": message["workers"]})
        socket.send_fds(self.template, [request], [end_for_child.fileno() for end_for_child in theirs])
        for end_for_child in theirs:
            end_for_child.close()

    def give_store_its_port(self, group: Group, host: str, port: int) -> None:
        with listen(host, port) as listener:
            group.port = listener.getsockname()[1]
            socket.send_fds(group.channels[STORE], [encode({"host": host})], [listener.fileno()])

    def adopt(self, message: Message) -> None:
        group = self.groups.get(message["group"])
        if group is None:  # dropped meanwhile
            for pid in message["pids"]:
                end(pid, signal.SIGKILL)
            return
        for rank, pid in zip([STORE, *range(len(message["pids"]) - 1)], message["pids"], strict=True):
            group.alive[pid] = rank
        self.say(**{"is": "parked", "group": group.name, "pids": message["pids"], "port": group.port})
        for pid in list(group.alive):
            if pid in self.early:
                self.member_exited(group, pid, *self.early.pop(pid))

    def do_release(self, message: Message) -> None:
        """Let a parked group go: {group, host, port, workers: [{env, stdout, stderr}]}; surplus parked workers end."""
        group = self.groups.get(message["group"])
        if group is None or not group.alive:
            raise OSError("there is no such parked group")
        if group.port == 0:
            self.give_store_its_port(group, message["host"], message["port"])
        pids = {rank: pid for pid, rank in group.alive.items()}
        for rank, worker in enumerate(message["workers"]):
            worker["env"]["MASTER_PORT"] = str(group.port)
            try:
                group.channels[rank].send(encode(worker))
            except OSError:
                pass  # it died while parked: its exit is told like any other
        for rank in [rank for rank in group.channels if rank >= len(message["workers"])]:
            group.alive.pop(pids[rank], None)
            end(pids[rank], signal.SIGKILL)
        for rank in [rank for rank in group.channels if rank != STORE]:
            group.channels.pop(rank).close()
        self.begin(group, pids)

    def do_exec(self, message: Message) -> None:
        """Start a group cold: {group, host, port, cwd, env, store, workers: [{argv, env, stdout, stderr}]}.

        A worker's `env` is what it has besides everybody's.
        """
        ours, theirs = pair()
        group = self.groups[message["group"]] = Group(message["group"], {STORE: ours}, 0)
        with theirs, listen(message["host"], message["port"]) as listener:
            group.port = listener.getsockname()[1]
            for fd in (listener.fileno(), theirs.fileno()):
                os.set_inheritable(fd, True)
            store = message["store"]
            argv = [*store["argv"], message["host"], str(listener.fileno()), str(theirs.fileno())]
            group.alive[self.spawn(argv, message["env"], message["cwd"], None, None)] = STORE
            for fd in (listener.fileno(), theirs.fileno()):
                os.set_inheritable(fd, False)
        for rank, worker in enumerate(message["workers"]):
            env = {**message["env"], **worker["env"], "MASTER_PORT": str(group.port)}
            pid = self.spawn(worker["argv"], env, message["cwd"], worker["stdout"], worker["stderr"])
            group.alive[pid] = rank
        self.begin(group, {rank: pid for pid, rank in group.alive.items()})

    def begin(self, group: Group, pids: dict[int, int]) -> None:
        group.running = True
        workers = [pids[rank] for rank in sorted(pids) if rank != STORE and pids[rank] in group.alive]
        self.say(**{"is": "started", "group": group.name, "pids": workers, "store": pids[STORE], "port": group.port})

    def spawn(self, argv: list[str], env: dict[str, str], cwd: str, stdout: str | None, stderr: str | None) -> int:
        """Fork and exec as `Popen(start_new_session=True)` would; the parent's death is the child's."""
        owner = os.getpid()
        # Our handlers are the child's until it execs: a signal in between waits for the default action, or is lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:
                os._exit(0)
            signal.set_wakeup_fd(-1)
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            for signum in DEAF_TO:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            redirect(stdout, stderr)
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except BaseException as error:  # noqa: BLE001 this is a forked child: nothing may go back to the owner's loop
            os.write(2, f"elasticd: cannot start {argv[0]}: {error}\n".encode())
        os._exit(127)

    def do_signal(self, message: Message) -> None:
        """Send {group, signal}; SIGKILL reaches the store too, and what the workers left behind."""
        group = self.groups.get(message["group"])
        if group is None:
            return
        if message["signal"] == signal.SIGKILL:
            group.failed = True
            if not group.running:
                self.drop(group)
                return
        for pid in group.workers() if message["signal"] != signal.SIGKILL else list(group.alive):
            end(pid, message["signal"])

    def drop(self, group: Group) -> None:
        for channel in group.channels.values():
            channel.close()
        for pid in group.alive:
            end(pid, signal.SIGKILL)
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
            elif dead == self.template_pid:
                self.template_pid = 0
                why = how_it_ended(status)
                self.say(**{"is": "template_gone", "why": why})
                self.forget_template(why)
            else:
                self.early[dead] = (status, now)
                while len(self.early) > 1024:
                    self.early.pop(next(iter(self.early)))

    def member_exited(self, group: Group, pid: int, status: int, at: float) -> None:
        rank = group.alive.pop(pid)
        if not group.running:
            self.drop(group)
            self.say(**{"is": "refused", "group": group.name, "why": f"a parked process {how_it_ended(status)}"})
            return
        self.say(**{"is": "exited", "group": group.name, "local_rank": rank, "pid": pid, "status": status, "at": at})

    def finish(self, group: Group) -> None:
        """A running group whose last worker ended is over: its store and what its workers left behind end with it."""
        if not group.running or group.workers():
            return
        for pid in group.alive:
            end(pid, signal.SIGKILL)
        leftovers = self.leftovers()
        if leftovers and any(not group.running and not group.alive for group in self.groups.values()):
            return  # some of these may be a parked group's: the template is about to tell
        if leftovers and group.leftovers_since is None:
            group.leftovers_since = time.monotonic()
            if not group.failed:
                for pid in leftovers:
                    end(pid, signal.SIGTERM)
        waited = time.monotonic() - (group.leftovers_since or time.monotonic())
        if leftovers and (group.failed or waited > LEFTOVER_GRACE_S):
            for pid in leftovers:
                if waited > CLEANER_GRACE_S or not is_cleaner(pid):
                    end(pid, signal.SIGKILL)
        if group.alive or (leftovers and waited <= 2 * LEFTOVER_GRACE_S):
            return
        for channel in group.channels.values():
            channel.close()
        del self.groups[group.name]
        self.say(**{"is": "gone", "group": group.name, "undying": leftovers})

    def leftovers(self) -> list[int]:
        """Our children that are neither the template nor in a group: orphans of ended workers."""
        known = {self.template_pid, *(pid for group in self.groups.values() for pid in group.alive)}
        return [pid for pid in children() if pid not in known]

    def end_everything(self) -> None:
        """Kill every descendant: each death hands us its children, until none is left. Bounded."""
        end_children(2 * LEFTOVER_GRACE_S)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


def redirect(stdout: str | None, stderr: str | None) -> None:
    """Append this process' output to files; None leaves a stream as inherited. The files are the owner's alone."""
    for path, fd in ((stdout, 1), (stderr, 2)):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)


def end_children(within_s: float) -> None:
    """Kill and reap our children and theirs, each of whose deaths makes more of them ours. Bounded."""
    started = now = time.monotonic()
    while now < started + within_s:
        for pid in children():
            if now > started + CLEANER_GRACE_S or not is_cleaner(pid):
                end(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)
        now = time.monotonic()


def children() -> list[int]:
    """Pids of our direct children, zombies among them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()]


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def is_cleaner(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            words = cmdline.read()
        return any(cleaner in words for cleaner in CLEANERS)
    except OSError:
        return False


def end(pid: int, signum: int) -> None:
    """Signal a child that is not reaped yet, so that the pid is still its own, and once only.

    The process group it leads hears of everything but SIGKILL, as it would of a terminal's signals: who is left of a
    killed process is our child then, and gets its turn.
    """
    try:
        if signum == signal.SIGKILL or os.getpgid(pid) != pid:
            os.kill(pid, signum)
        else:
            os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def main() -> None:
    fd, runtime_dir = int(sys.argv[1]), sys.argv[2]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"elasticd-owner")
    for deaf_to in DEAF_TO:
        if signal.getsignal(deaf_to) is not signal.SIG_IGN:  # the agent's end of file is the one thing that ends us
            signal.signal(deaf_to, lambda *_: None)  # a handler, since what is ignored stays ignored in the workers
    agent = socket.socket(fileno=fd)
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    os.set_inheritable(fd, False)
    Owner(agent, runtime_dir).run()


if __name__ == "__main__":
    main()

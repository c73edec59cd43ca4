"""The agent's helper for a c10d store: loads torch's TCPStore once, and forks the clients and the server of a TCPStore.

Runs with the job's interpreter as `python -u fork_server.py CONTROL_FD PARENT_PID PATHS...`, with the paths where our
packages are: the interpreter need not have them. A fork costs milliseconds where a
start costs a second, so a client stuck in torch is killed and replaced at once. Each request and each answer is one
packet:

    {"do": "connect", "host", "port", "timeout_s"}  + one end of a channel   -> {"pid"}
    {"do": "serve", "standalone", "term"}  + a listening socket, one end of a channel -> {"pid"}
    {"do": "end", "pid"}                                                     -> {"pid"}
    {"do": "alive", "pid"}                                                   -> {"alive"}

This process and its children end with the control socket or with the agent. It always has one thread.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

sys.path[:1] = sys.argv[3:]
from elasticd import channel as messages  # noqa: E402
from elasticd_agent.store.c10d.client_process import C10dClient  # noqa: E402
from elasticd_agent.store.c10d.server_process import serve  # noqa: E402
from elasticd_agent.store.c10d.tcp_store import TcpStoreConnection, set_host_lookup  # noqa: E402
from elasticd_agent.store.c10d.torch_import import load_tcp_store  # noqa: E402
from elasticd_agent.system.processes.process import IGNORED_SIGNALS, PR_SET_NAME, PR_SET_PDEATHSIG, prctl  # noqa: E402

del sys.path[: len(sys.argv[3:])]


def main() -> None:
    """Load TCPStore, say so, and serve requests until the control socket or the agent ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    # Both must be final before the import: a second thread would make a fork unsafe.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    for number in IGNORED_SIGNALS:  # a terminal signals its process group, a batch system every process of a job
        signal.signal(number, signal.SIG_IGN)
    try:
        tcp_store = load_tcp_store()
    except (ImportError, AttributeError) as error:
        messages.send(control, {"error": f"{type(error).__name__}: {error}"})
        return
    gc.freeze()
    messages.send(control, {"ready": os.getpid()})
    ForkServer(tcp_store, control).serve()


def die_with(parent: int) -> None:
    """End with `parent`, also if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """The forking process: it has one thread, no lock is held when it forks, and it never uses the store itself."""

    def __init__(self, tcp_store: Callable[..., Any], control: socket.socket) -> None:
        self._tcp_store = tcp_store
        self._control = control
        self._children: set[int] = set()

    def serve(self) -> None:
        """Answer one request after the other, each at once: a fork is the slowest of them."""
        while True:
            request, fds = messages.receive_with_descriptors(self._control, 2)
            if request is None:
                break
            messages.send(self._control, self._handle(request, fds))
        for pid in list(self._children):
            self._kill_child(pid)
        os._exit(0)  # torch's work at exit takes half a second and is not needed here

    def _handle(self, request: messages.Message, fds: list[int]) -> messages.Message:
        match request["do"]:
            case "connect":
                with socket.socket(fileno=fds[0]) as channel:
                    return {"pid": self._fork(lambda: self._run_client(request, channel))}
            case "serve":
                with socket.socket(fileno=fds[0]) as listener, socket.socket(fileno=fds[1]) as channel:
                    return {"pid": self._fork(lambda: self._run_server(request, listener, channel))}
            case "end":
                self._kill_child(request["pid"])
                return {"pid": request["pid"]}
            case _:
                return {"alive": self._is_alive(request["pid"])}

    def _fork(self, run: Callable[[], None]) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(me, run)
        self._children.add(pid)
        return pid

    def _run_child(self, parent: int, run: Callable[[], None]) -> NoReturn:
        status = 1
        try:
            die_with(parent)
            self._control.close()
            run()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)

    def _run_client(self, request: messages.Message, channel: socket.socket) -> None:
        prctl(PR_SET_NAME, b"elasticd-c10d-c")
        port, timeout_s = request["port"], request["timeout_s"]
        address = ""

        def connect() -> TcpStoreConnection:
            nonlocal address
            # torch repeats a refused connection, and gives the reason in many lines of C++; this gives it in one.
            with socket.create_connection((address or request["host"], port), timeout_s) as probe:
                if probe.getsockname() == probe.getpeername():  # a port without a listener can be its own peer
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                address = probe.getpeername()[0]
            set_host_lookup(b"files")
            return TcpStoreConnection(self._tcp_store, address, port, timeout_s)

        C10dClient(connect, channel).serve()

    def _run_server(self, request: messages.Message, listener: socket.socket, channel: socket.socket) -> None:
        prctl(PR_SET_NAME, b"elasticd-c10d-h")
        set_host_lookup(b"files")
        # A connection for each agent and each watch of an agent: thousands in a large job.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        serve(self._tcp_store, listener, channel, request["standalone"], request["term"])

    def _is_alive(self, pid: int) -> bool:
        """Reaps an ended child here, so that no other process can get its pid before."""
        if pid not in self._children:
            return False
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            return True
        self._children.remove(pid)
        return False

    def _kill_child(self, pid: int) -> None:
        if self._is_alive(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._children.remove(pid)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the agent has given up and has reported why; the children end with this process

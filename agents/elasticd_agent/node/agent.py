"""`elasticd agent`: builds the daemon, runs its deciding loop, and is the one place that knows about its process.

Signals become words in the loop's inbox: SIGTERM and SIGINT drain the node and end the daemon, SIGHUP has it read its
configuration again, SIGUSR2 has it replace itself, as the same process, by what is installed now. Runners notice none
of it: they are processes of their own, found again by their locks.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from elasticd.errors import UsageError
from elasticd_agent.config.agent_settings import NodeSettings, load
from elasticd_agent.config.env_variables import AGENT_FLAGS
from elasticd_agent.config.reload import merge_reloaded as merged_settings
from elasticd_agent.config.store_options import store_policy, store_rendezvous
from elasticd_agent.model.job import Rendezvous
from elasticd_agent.model.version import version
from elasticd_agent.node import state_dir as statedir
from elasticd_agent.node.api.service import JobService
from elasticd_agent.node.api.setup import open_api
from elasticd_agent.node.cleanup import DiskCleaner
from elasticd_agent.node.dashboard.routes import dashboard_routes
from elasticd_agent.node.health.events import report_change
from elasticd_agent.node.health.monitor import HealthChanged, NodeHealth
from elasticd_agent.node.health.setup import monitor_settings, open_health
from elasticd_agent.node.inventory import inventory
from elasticd_agent.node.journal import AgentJournal
from elasticd_agent.node.loop import LoopDependencies, Message, NodeLoop, SignalRequest, Wakeup
from elasticd_agent.node.metrics import NodeMetrics
from elasticd_agent.node.registration import NodeStatusPublisher
from elasticd_agent.node.runners.manager import RunnerManager
from elasticd_agent.node.runners.spec_builder import SpecBuilder
from elasticd_agent.node.scheduler.scheduler import Scheduler
from elasticd_agent.node.scrape import merge_pages, scrape_runners
from elasticd_agent.node.sd_notify import Notifier, open_notifier
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.file import FileStore
from elasticd_agent.store.open import open_store
from elasticd_agent.system.addresses import format_endpoint, local_address
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.telemetry import events
from elasticd_agent.telemetry.console import PlainConsole
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages

STORE_JOURNAL = "store.journal"
REPLACEMENT_CHECK_S = 20.0
"""The deciding thread waits meanwhile, and systemd's watchdog may be as short as 30 s (deploy/systemd)."""
MAX_HEALTHY_LAG_S = 30.0
"""A deciding thread that has not turned for this long is stuck; its own timers are far shorter."""
_SIGNAL_REQUESTS: Mapping[int, SignalRequest] = {
    signal.SIGTERM: SignalRequest("drain", "SIGTERM"),
    signal.SIGINT: SignalRequest("drain", "SIGINT"),
    signal.SIGHUP: SignalRequest("reload", "SIGHUP"),
    signal.SIGUSR2: SignalRequest("replace", "SIGUSR2"),
}


def agent(argv: Sequence[str]) -> int:
    """Returns 0 once it has left because it was asked to; raises UsageError for what cannot work here."""
    asked = _parser().parse_args(argv)
    if asked.supervised:
        from elasticd_agent.node.supervisor import supervise

        return supervise(_own_command(without="--supervised"))

    def read() -> NodeSettings:
        return _load_settings(asked)

    settings = read()
    faulthandler.enable()  # systemd's watchdog ends a daemon that hangs by SIGABRT: the journal has its stacks then
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    with signals_to_inbox(inbox):
        with contextlib.ExitStack() as stack:
            notifier = open_notifier(os.environ)
            replaces = _run(settings, read, lambda: installed_version_error(argv), inbox, notifier, stack)
        if replaces:
            _exec_replacement(notifier, inbox)
    return 0


def _run(
    settings: NodeSettings,
    read: Callable[[], NodeSettings],
    replacement_error: Callable[[], str],
    inbox: queue.SimpleQueue[Message],
    notifier: Notifier,
    stack: contextlib.ExitStack,
) -> bool:
    """True: the process is to replace itself."""
    stack.enter_context(statedir.exclusive(settings.state_dir))
    os.umask(0o077)
    outlet = NonBlockingWriter(2)
    stack.callback(outlet.close)
    journal = AgentJournal(PlainConsole(outlet, settings.node), settings.logs / "events.jsonl", settings.node)
    stack.callback(journal.close)
    where = store_rendezvous(settings)
    store = _open_store(settings, journal)
    stack.callback(store.close)
    cache = StoreCache(store, journal.warn, lambda: inbox.put(Wakeup()))
    card = inventory(settings, statedir.incarnation(settings.state_dir, settings.node), os.environ)
    runners = RunnerManager(settings.state_dir, lambda: inbox.put(Wakeup()), journal.log)
    stack.callback(runners.close)
    metrics = NodeMetrics(settings.node, version())
    announcement = NodeStatusPublisher(store, card, float(settings.lease_s), float(settings.renewal_s), metrics.lease)
    placer = Scheduler(
        store,
        card.node,
        card.incarnation,
        float(settings.lease_s),
        float(settings.renewal_s),
        float(settings.adopt_timeout_s),
        changed=lambda: inbox.put(Wakeup()),
        announce=announcement.announce_with_node,
        retention_s=float(settings.keep_ended_s),
        cache=cache,
    )
    health = open_health(settings, os.environ, idle=lambda: not runners.alive())
    stack.callback(health.close)
    parts = LoopDependencies(
        store, cache, announcement, runners, placer, health, notifier, journal, inbox, card, metrics
    )
    orders = SpecBuilder(settings, where, settings.devices(os.environ))

    def reload(old: NodeSettings) -> tuple[NodeSettings, list[str]]:
        new, said = merged_settings(old, read())
        health.update(monitor_settings(new, os.environ))
        placer.adopt_timeout_s, placer.retention_s = float(new.adopt_timeout_s), float(new.keep_ended_s)
        return new, said

    def changed(now: HealthChanged) -> None:
        report_change(now, journal.event)
        inbox.put(Wakeup())

    deciding = NodeLoop(parts, orders, reload, replacement_error)
    serving = open_api(
        lambda: deciding.settings,
        store,
        cache,
        lambda desk: _pages(deciding, desk, metrics, health),
        lambda api, token, tls: dashboard_routes(api, token, version(), tls=tls),
    )
    stack.callback(serving.close)
    sweeper = DiskCleaner(
        settings.state_dir, deciding.jobs_with_files_in_use, lambda: float(deciding.settings.keep_ended_s), journal.log
    )
    stack.callback(sweeper.close)
    deciding.set_address(_advertised_address(settings, where, serving.address))
    adopted = deciding.adopt()
    health.start(changed)
    who = f"elasticd {version()}, pid {os.getpid()}"
    journal.event(
        events.AgentStartedEvent,
        f"{who}: the agent of node {card.node} starts" + (f", and finds {adopted} runner(s)" if adopted else ""),
        version=version(),
        pid=os.getpid(),
        adopted=adopted,
    )
    replaces = False
    try:
        replaces = deciding.run()
    finally:
        deciding.close(leaves=not replaces)
    how = "is replaced by what is installed now" if replaces else "has left"
    code = None if replaces else 0
    journal.event(events.AgentEndedEvent, f"{who}: the agent of node {card.node} {how}", exit_code=code)
    return replaces


def _pages(loop: NodeLoop, service: JobService, metrics: NodeMetrics, health: NodeHealth) -> MonitoringPages:
    def page() -> bytes:
        node = loop.status.node
        jobs = scrape_runners(node, loop.jobs(), service.local.metrics)
        return merge_pages([metrics.render(loop.facts()), health.metrics(node), *jobs])

    def healthy() -> HealthProbeResult:
        late = loop.lag_s()
        return HealthProbeResult(
            late < MAX_HEALTHY_LAG_S, f"the deciding thread is {late:.0f} s late" if late > 1 else "it decides"
        )

    def status() -> Mapping[str, Any]:
        return {**loop.status.to_dict(), "joined": loop.registered, "store_away": loop.store_down}

    return MonitoringPages(
        metrics=page, status=status, healthy=healthy, ready=lambda: HealthProbeResult(*loop.readiness())
    )


def _advertised_address(settings: NodeSettings, rendezvous: Rendezvous, bound_to: tuple[str, int] | None) -> str:
    """HOST:PORT by which other nodes reach us, if they do."""
    if bound_to is None:
        return ""
    host, port = bound_to
    if host in ("0.0.0.0", "::"):
        host = settings.local_addr or (
            local_address(rendezvous.endpoints, None) if rendezvous.endpoints else "127.0.0.1"
        )
    return format_endpoint(host, port)


def _open_store(settings: NodeSettings, journal: AgentJournal) -> Store:
    if settings.store.backend == "local":
        return FileStore(settings.state_dir / STORE_JOURNAL, log=journal.warn)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # whom we fork execs at once; gRPC would complain about each
    return open_store(store_rendezvous(settings), sys.executable, store_policy(settings), journal.warn)[0]


# --- the process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_to_inbox(inbox: queue.SimpleQueue[Message]) -> Iterator[None]:
    """From here on signals are words. Those that came while this process was replacing itself are heard now."""

    def hear(signum: int, _: FrameType | None) -> None:
        inbox.put(_SIGNAL_REQUESTS[signum])

    before = {signum: signal.signal(signum, hear) for signum in _SIGNAL_REQUESTS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNAL_REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, _SIGNAL_REQUESTS
        )  # what comes now is the next one's, or comes too late
        for signum, handler in before.items():
            signal.signal(signum, handler)


def installed_version_error(arguments: Sequence[str] = ()) -> str:
    """Why what is installed now could not take over with these arguments; "" if it can. Takes a second; bounded.

    It reads the configuration as well: whoever takes over and then finds it wrong is gone, and its jobs with it.
    """
    program = (
        "import sys, elasticd_agent.cli.main, elasticd_agent.node.agent as it; "
        "sys.exit(getattr(it, 'startup_error', lambda arguments: '')(sys.argv[1:]) or 0)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=REPLACEMENT_CHECK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the version that is installed does not start: {error}"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return "" if done.returncode == 0 else f"the version that is installed does not start: {last}"


def startup_error(argv: Sequence[str]) -> str:
    """Why an agent with these arguments would not start; "" if it would."""
    try:
        asked = _parser().parse_args(argv)
        _load_settings(asked)
    except UsageError as error:
        return str(error)
    return ""


def _load_settings(options: argparse.Namespace) -> NodeSettings:
    told = {flag: text for flag in AGENT_FLAGS if (text := getattr(options, flag[2:].replace("-", "_"))) is not None}
    return load(options.config, os.environ, told)


def _exec_replacement(notifier: Notifier, inbox: queue.SimpleQueue[Message]) -> NoReturn:
    """Become what is installed now: same process, same children. Signals wait, blocked, until it listens.

    So do those that nobody has acted on: the stop that systemd asks for while this replaces itself must not be lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNAL_REQUESTS)
    numbers = {asked: signum for signum, asked in _SIGNAL_REQUESTS.items()}
    with contextlib.suppress(queue.Empty):
        while True:
            if isinstance(unheard := inbox.get_nowait(), SignalRequest) and unheard.action != "replace":
                signal.raise_signal(numbers[unheard])
    os.execve(sys.executable, _own_command(), {**os.environ, **notifier.inherited})


def _own_command(without: str = "") -> list[str]:
    """The command line of this very process."""
    return [sys.executable, *(word for word in sys.orig_argv[1:] if word != without)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elasticd agent",
        description="Runs for months on one node: announces it, runs the jobs placed on it, leaves when asked.",
        epilog="SIGTERM drains the node and ends the agent, SIGHUP has it read its configuration again, SIGUSR2 has it "
        "replace itself by the version that is installed now; jobs go on. Exit codes: 0 it has left, 2 usage. "
        "More: docs/agent.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="agent.toml; otherwise defaults and ELASTICD_…")
    for flag, key in AGENT_FLAGS.items():
        parser.add_argument(
            flag, metavar={"--bind": "ADDR", "--port": "PORT"}.get(flag, "TIME"), help=f"instead of {key} in FILE"
        )
    parser.add_argument(
        "--supervised", action="store_true", help="start the agent again whenever it dies: for containers"
    )
    return parser

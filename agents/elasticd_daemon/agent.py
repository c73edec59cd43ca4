"""`elasticd agent`: builds the agent, runs its main loop, and handles signals and its replacement by exec.

Signals become messages in the loop's inbox: SIGTERM and SIGINT drain the node and end the agent, SIGHUP reloads the
configuration, SIGUSR2 replaces the agent, as the same process, by the installed version. None of them affects runners:
they are separate processes, which a later agent finds by their locks.

The replacement keeps the pid, since systemd and Kubernetes watch it, and execs the installed interpreter anew. It is
tried first (`installed_version_error`): a broken installation, or a configuration that the new version refuses, leaves
the old agent running with a sentence. Signals are blocked from the last look at the inbox to the first one of the
replacement, so none is lost in between.

At its start an agent copies its code into the state directory and imports from there, as its runners do. What is
installed may then be replaced at any time, by a package manager or by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError
from elasticd.sigterm import TOGETHER_S
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.config.notice_options import parse_notice_service
from elasticd_agent.model import log_events as events
from elasticd_agent.model.job import REQUEUE_EXIT_CODE, Rendezvous
from elasticd_agent.model.phrases import has_have, listing
from elasticd_agent.model.version import version
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.open import open_store
from elasticd_agent.system import installation
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.heaps import share_one_heap
from elasticd_agent.system.network.addresses import format_endpoint, local_address
from elasticd_agent.system.network.http_auth import TokenAuth
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.system.processes.process import STRAY_SIGNALS, handle_signals_unless_ignored, signal_name
from elasticd_agent.telemetry.console import PlainConsole
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages
from elasticd_daemon import state_dir
from elasticd_daemon.api.audit import AuditedRoutes
from elasticd_daemon.api.local import LocalJobs
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.rank_logs import rounds_with_logs
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.server import ApiServer
from elasticd_daemon.api.service import JobService
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.allow_lists import refusal
from elasticd_daemon.config.job_file import JobFile
from elasticd_daemon.config.load import KEYS_THAT_LOSE_JOBS, load, merge_reloaded
from elasticd_daemon.config.store_options import store_policy, store_rendezvous
from elasticd_daemon.dashboard.login import LoginCookies
from elasticd_daemon.dashboard.routes import DashboardRoutes
from elasticd_daemon.health.checks import NodeChecks
from elasticd_daemon.health.monitor import HealthMonitor, health_file, report_change
from elasticd_daemon.health.policy import HealthVerdict
from elasticd_daemon.job_dir import job_files
from elasticd_daemon.journal import AgentJournal
from elasticd_daemon.loop import LoopDependencies, Message, MustReplace, NodeLoop, SignalRequest, Wakeup
from elasticd_daemon.metrics import AUDITED_REQUESTS, NodeMetrics, RunnerScraper, health_samples, merge_pages
from elasticd_daemon.registration import NodeNameConflict, NodeStatusPublisher, inventory
from elasticd_daemon.runners import versions
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.spawn import SpecBuilder
from elasticd_daemon.scheduler import job_queue
from elasticd_daemon.scheduler.scheduler import Scheduler
from elasticd_daemon.sd_notify import Notifier, take_notifier
from elasticd_daemon.state_dir import DiskCleaner

LOCAL_STORE = "store.sqlite"
FORMER_LOCAL_STORE = "store.journal"
REPLACEMENT_CHECK_TIMEOUT_S = 20.0
"""The main loop waits for it, and systemd's watchdog may be as short as 30 s (deploy/systemd)."""
MAX_HEALTHY_LAG_S = 30.0
"""A main loop that has not run for this long is stuck; its own timers are far shorter."""
ADDRESS_TIMEOUT_S, ADDRESS_RETRY_S = 2.0, 5.0
"""A name server that does not answer takes minutes, longer than runners wait for an agent."""
GC_THRESHOLDS = (20_000, 5, 5)
"""Few collections: the store's records have no cycles, and lists of 10,000 jobs take twice the time with Python's own
thresholds. Errors and their tracebacks have cycles; at these thresholds they take no megabytes."""
_LOOPBACK = ("127.", "::1", "localhost")
_SIGNAL_REQUESTS: Mapping[int, SignalRequest] = {
    signal.SIGTERM: SignalRequest("drain", "SIGTERM"),
    signal.SIGINT: SignalRequest("drain", "SIGINT"),
    signal.SIGHUP: SignalRequest("reload", "SIGHUP"),
    signal.SIGUSR2: SignalRequest("replace", "SIGUSR2"),
}


def agent(argv: Sequence[str]) -> int:
    """Returns 0 once it has left on request, 75 where this machine or the store keeps it from starting now.

    Raises UsageError for a configuration that cannot work here.
    """
    options = build_parser().parse_args(argv)
    if options.supervised:
        from elasticd_daemon.supervisor import supervise

        return supervise(_own_command(without="--supervised"))
    settings = load(options.config, os.environ)
    if os.path.lexists(former := settings.state_dir / FORMER_LOCAL_STORE) and settings.store.backend == "local":
        raise UsageError(f"{former} has jobs of an earlier version: end them with that version, then remove the file")
    if options.check:
        return 0
    gc.set_threshold(*GC_THRESHOLDS)
    share_one_heap()
    faulthandler.enable()  # systemd's watchdog ends a hung agent with SIGABRT: the journal then has its stacks
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    with signals_to_inbox(inbox):
        try:
            with contextlib.ExitStack() as stack:
                notifier = take_notifier(os.environ)
                replaces = _run_agent(
                    settings,
                    lambda: load(options.config, os.environ),
                    lambda: installed_version_error(argv),
                    inbox,
                    notifier,
                    stack,
                )
        except NodeNameConflict as error:
            raise UsageError(str(error)) from None
        except UsageError as error:
            # The configuration has been read. An interface without its address yet or a read-only disk may recover.
            print(f"elasticd agent: error: {error}", file=sys.stderr)
            return REQUEUE_EXIT_CODE
        if replaces:
            exec_replacement(notifier, inbox)
    return 0


def _run_agent(
    settings: NodeSettings,
    read: Callable[[], NodeSettings],
    replacement_error: Callable[[], str],
    inbox: queue.SimpleQueue[Message],
    notifier: Notifier,
    stack: contextlib.ExitStack,
) -> MustReplace:
    """Build the agent's parts and run its main loop."""

    state = settings.state_dir
    stack.enter_context(state_dir.exclusive_use(state))
    os.umask(0o077)
    output = NonBlockingWriter(2)
    stack.callback(output.close)
    journal = AgentJournal(PlainConsole(output, settings.node), settings.logs, settings.node)
    stack.callback(journal.close)
    code = _use_code_copy(state, journal)
    parts = _open_parts(settings, code, journal, inbox, notifier, stack)
    if settings.preemption_notices:
        from elasticd_agent.system.network.preemption import PreemptionMonitor  # it takes an HTTP client

        services = tuple(map(parse_notice_service, settings.preemption_notices))
        monitor = PreemptionMonitor(services, lambda notice: inbox.put(SignalRequest("notice", notice)), journal.warn)
        stack.callback(monitor.close)
    rendezvous = store_rendezvous(settings)
    specs = SpecBuilder(settings, rendezvous, settings.devices(os.environ))
    loop = NodeLoop(
        parts,
        specs,
        lambda old: _reload(parts, old, read()),
        lambda: replacement_error() or _lost_jobs_error(loop, read),
    )
    serving = _open_api(loop, parts)
    stack.callback(serving.close)
    cleaner = DiskCleaner(state, loop.jobs_with_files_in_use, lambda: float(loop.settings.keep_ended_s), journal.log)
    stack.callback(cleaner.close)

    def use(address: str) -> None:
        if not address:
            journal.warn(
                f"http.bind {settings.http.bind} cannot be reached by other nodes, which ask each other for logs and "
                "ranks of jobs; write an address that they can reach, 0.0.0.0 for IPv4, or :: for IPv6 and IPv4"
            )
        serving.token_auth.address = address
        loop.set_address(address)
        inbox.put(Wakeup())

    find_address(lambda: advertised_address(settings, rendezvous, serving.address), use, journal.warn)
    return _run_loop(loop, parts, code)


def _open_parts(
    settings: NodeSettings,
    code: Path | None,
    journal: AgentJournal,
    inbox: queue.SimpleQueue[Message],
    notifier: Notifier,
    stack: contextlib.ExitStack,
) -> LoopDependencies:
    """The parts that the main loop works with; `stack` closes them."""

    def wake() -> None:
        inbox.put(Wakeup())

    lease_s, renewal_s = float(settings.lease_s), float(settings.renewal_s)
    store = _open_store(settings, journal)
    stack.callback(store.close)
    cache = StoreCache(store, journal.warn, wake)
    status = inventory(settings, state_dir.persistent_incarnation(settings.state_dir, settings.node), os.environ)
    runners = RunnerManager(settings.state_dir, wake, journal.log, code)
    stack.callback(runners.close)
    metrics = NodeMetrics(settings.node, version())
    status_publisher = NodeStatusPublisher(store, status, lease_s, renewal_s, metrics.on_renewal)
    scheduler = Scheduler(
        store,
        status.node,
        status.incarnation,
        lease_s,
        renewal_s,
        float(settings.adopt_timeout_s),
        on_change=wake,
        announce=status_publisher.key.announce_under_lease,
        retention_s=float(settings.keep_ended_s),
        refuse_timeout_s=float(settings.refuse_timeout_s),
        cache=cache,
        trained_here=lambda job, number: bool(rounds_with_logs(job_files(settings.state_dir, job, number))),
    )
    file = health_file(settings)
    file.max_gpus = len(settings.devices(os.environ))
    health = HealthMonitor(
        lambda on_event: NodeChecks(settings, os.environ, on_event), settings, file, idle=lambda: not runners.alive()
    )
    stack.callback(health.close)
    return LoopDependencies(
        store, cache, status_publisher, runners, scheduler, health, notifier, journal, inbox, status, metrics
    )


def _reload(parts: LoopDependencies, old: NodeSettings, read: NodeSettings) -> tuple[NodeSettings, list[str]]:
    """Use the new settings, as far as they may change while the agent runs. Returns them, and the changes in words."""
    new, changes = merge_reloaded(old, read)
    parts.health.update(new)
    parts.scheduler.adopt_timeout_s = float(new.adopt_timeout_s)
    parts.scheduler.retention_s = float(new.keep_ended_s)
    parts.scheduler.refuse_timeout_s = float(new.refuse_timeout_s)
    return new, changes


def _run_loop(loop: NodeLoop, parts: LoopDependencies, code: Path | None) -> MustReplace:
    """Take over the runners of an earlier agent, and run the main loop to its end."""
    journal = parts.journal

    def health_changed(change: HealthVerdict) -> None:
        report_change(change, journal.event)
        parts.inbox.put(Wakeup())

    adopted = loop.adopt_runners()
    _warn_of_local_jobs(loop, journal)
    if code is not None:
        versions.remove_unused(loop.settings.state_dir, code)
    parts.health.start(health_changed)
    me = f"elasticd {version()}, pid {os.getpid()}: the agent of node {loop.status.node}"
    journal.event(
        events.AgentStartedEvent,
        f"{me} starts" + (f" and adopts {adopted} runner(s)" if adopted else ""),
        version=version(),
        pid=os.getpid(),
        adopted=adopted,
    )
    leaves = False  # an agent that crashes is missed
    try:
        replaces = loop.run()
        leaves = not replaces
    finally:
        loop.close(leaves=leaves)
    how = "is replaced by the installed version" if replaces else "has left"
    journal.event(events.AgentEndedEvent, f"{me} {how}", exit_code=None if replaces else 0)
    return replaces


def _use_code_copy(state: Path, journal: AgentJournal) -> Path | None:
    """A copy of elasticd's code for the runners and, from now on, for this process; None: it cannot be made."""
    try:
        code = versions.ensure_copy(state)
    except OSError as error:
        journal.warn(
            f"no copy of elasticd in {state / 'versions'} ({error.strerror}): jobs that start now use the installed "
            "files; do not upgrade elasticd while they run"
        )
        return None
    installation.switch_to_copy(code)
    return code


def _open_api(loop: NodeLoop, parts: LoopDependencies) -> ApiServer:
    """The HTTP API with the dashboard; its listeners keep the settings of the start. Raises UsageError."""
    settings, http = loop.settings, loop.settings.http
    token, tls = (
        TokenAuth(http.token_file, http.tokens, http.read_only, http.agents_token_file),
        http.tls_cert is not None,
    )

    def check(job: JobFile) -> None:
        if (wrong := refusal(loop.settings.limits, job, loop.settings.user)) is not None:
            raise wrong

    local = LocalJobs(settings.node, settings.state_dir, gpu_usage=parts.health.gpu_usage)
    peers = Peers(token.agents_token, tls, http.tls_ca, http.tls_name)
    service = JobService(
        parts.store,
        local,
        peers,
        check,
        max_jobs_per_submitter=lambda: loop.settings.limits.jobs_per_submitter,
        cache=parts.cache,
    )
    cookies = LoginCookies(token, time.time, tls, state_dir.cookie_key(settings.state_dir))
    routes = DashboardRoutes(ApiRoutes(service, _pages(loop, parts, local)), token, cookies, version())
    audited = AuditedRoutes(routes, parts.journal.audit, lambda action: parts.metrics.count(AUDITED_REQUESTS, action))
    server = ApiServer(settings.socket_path, http, audited, token)
    host, port = server.address
    routes.base_url = f"{'https' if tls else 'http'}://" + format_endpoint(
        "localhost" if host in ("0.0.0.0", "::") else host, port
    )
    return server


def _pages(loop: NodeLoop, parts: LoopDependencies, local: LocalJobs) -> MonitoringPages:
    """The pages for probes and Prometheus: the agent's own metrics beside those of its runners."""
    scraper = RunnerScraper(loop.status.node, local.metrics)

    def page() -> bytes:
        jobs = scraper.scrape(loop.jobs())
        health = parts.health
        samples = health_samples(health.current(), health.failure_streak(), health.results, health.gpu_usage())
        return merge_pages([parts.metrics.render({**loop.gauges(), **samples}), *jobs])

    def healthy() -> HealthProbeResult:
        lag_s = loop.lag_s()
        return HealthProbeResult(
            lag_s < MAX_HEALTHY_LAG_S, f"the main loop is {lag_s:.0f} s late" if lag_s > 1 else "ok"
        )

    def status() -> Mapping[str, Any]:
        return {**loop.status.to_dict(), "registered": loop.registered, "store_unavailable": loop.store_unavailable}

    return MonitoringPages(page, status, healthy, ready=lambda: HealthProbeResult(*loop.readiness()))


def find_address(find: Callable[[], str], use: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Use what `find` returns; while the store's name is unknown in a thread, since the jobs here need an agent."""
    try:
        return use(run_within(ADDRESS_TIMEOUT_S, find))
    except (StoreUnavailable, DeadlineExceeded) as error:
        why = str(error) or f"no name of the store was resolved within {ADDRESS_TIMEOUT_S:g} s"
        warn(f"{why}; until then other nodes cannot ask this one")

    def retry() -> None:
        while True:
            time.sleep(ADDRESS_RETRY_S)
            with contextlib.suppress(StoreUnavailable, UsageError):
                return use(find())

    threading.Thread(target=retry, name="elasticd-address", daemon=True).start()


def advertised_address(settings: NodeSettings, rendezvous: Rendezvous, bound_to: tuple[str, int]) -> str:
    """HOST:PORT of this agent for other nodes; "": it listens on loopback, or on IPv4 where its address is an IPv6 one.

    Raises StoreUnavailable while no name of the store is known.
    """
    (host, port), endpoints = bound_to, rendezvous.endpoints

    def reachable(*, leave_loopback: bool = False) -> str:
        if settings.local_addr or not endpoints:
            return settings.local_addr or "127.0.0.1"
        return local_address(endpoints, leave_loopback=leave_loopback)

    if host in ("0.0.0.0", "::"):
        listens, host = host, reachable(leave_loopback=True)
        if listens == "0.0.0.0" and ":" in host:
            return ""
    elif endpoints and host.startswith(_LOOPBACK):
        with contextlib.suppress(UsageError):  # no other machine is known
            if not reachable().startswith(_LOOPBACK):
                return ""
    return format_endpoint(host, port)


def _open_store(settings: NodeSettings, journal: AgentJournal) -> Store:
    """Open the store of the cluster; "local" is a file of this node."""
    if settings.store.backend == "local":
        from elasticd_agent.store.file import FileStore  # with SQLite, 2 MB that other agents need not have

        return FileStore(settings.state_dir / LOCAL_STORE, log=journal.warn)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # our forks exec at once; gRPC would log a warning for each
    return open_store(store_rendezvous(settings), sys.executable, store_policy(settings), journal.warn)


def _warn_of_local_jobs(loop: NodeLoop, journal: AgentJournal) -> None:
    """Name the jobs that have not ended in a local store that is not used any more: they are in no queue."""
    path = loop.settings.state_dir / LOCAL_STORE
    if loop.settings.store.backend == "local" or not path.exists():
        return
    from elasticd_agent.store.file import FileStore

    with contextlib.suppress(StoreRefused), contextlib.closing(FileStore(path)) as store:
        here = loop.jobs()
        left = [s.job for s in job_queue.read_view(store).unfinished() if (s.job, s.number) not in here]
        if left:
            journal.warn(
                f"this agent does not use {path} any more, where {listing(left)} {has_have(left)} not ended: submit "
                "again what is to run, then remove the file"
            )


@contextlib.contextmanager
def signals_to_inbox(inbox: queue.SimpleQueue[Message]) -> Iterator[None]:
    """Signals become messages, also those that arrived while this process was replacing itself.

    What comes within TOGETHER_S of a request to drain is the same request: a second one would kill jobs.
    """
    drained_at = -math.inf

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal drained_at
        request = _SIGNAL_REQUESTS.get(signum) or SignalRequest("ignore", signal_name(signum))
        if request.action == "drain":
            if (now := time.monotonic()) < drained_at + TOGETHER_S:
                return
            drained_at = now
        inbox.put(request)

    stray = handle_signals_unless_ignored(set(STRAY_SIGNALS) - _SIGNAL_REQUESTS.keys(), handle)
    before = {**stray, **{signum: signal.signal(signum, handle) for signum in _SIGNAL_REQUESTS}}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNAL_REQUESTS)
    try:
        yield
    finally:
        # A signal from now on is for the replacement, or too late.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNAL_REQUESTS)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def installed_version_error(arguments: Sequence[str] = ()) -> str:
    """Why the installed version cannot take over with these arguments; "" if it can. Takes a second; bounded.

    It reads the configuration, too: a replacement that found it wrong would exit and leave the jobs without an agent.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "elasticd_agent", "agent", "--check", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=REPLACEMENT_CHECK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the installed version does not start: {error}"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    why = last.removeprefix("elasticd agent: error: ")
    return "" if done.returncode == 0 else f"the installed version does not start: {why}"


def _lost_jobs_error(loop: NodeLoop, read: Callable[[], NodeSettings]) -> str:
    """Why a replacement would not be the agent of the jobs that run here; "" if it would."""
    try:
        new = read()
    except UsageError:  # the installed version has understood it
        return ""
    lost = [key for key in KEYS_THAT_LOSE_JOBS if getattr(new, key) != getattr(loop.settings, key)]
    if not lost or not loop.jobs():
        return ""
    return f"with another {listing(lost)} it would not find the jobs that run here; systemctl restart drains them first"


def exec_replacement(notifier: Notifier, inbox: queue.SimpleQueue[Message]) -> NoReturn:
    """Become the installed version: same process, same children. Signals stay blocked until it handles them.

    Unhandled requests become signals again: a stop that systemd requests during the replacement must not be lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNAL_REQUESTS)
    numbers = {request: signum for signum, request in _SIGNAL_REQUESTS.items() if request.action != "replace"}
    with contextlib.suppress(queue.Empty):
        while True:
            if (message := inbox.get_nowait()) in numbers:
                signal.raise_signal(numbers[message])
    notifier.feed()  # on a slow disk the check of the installed version took as long as its start will
    os.execve(sys.executable, _own_command(), {**os.environ, **notifier.inherited})


def _own_command(without: str = "") -> list[str]:
    return [sys.executable, *(word for word in sys.orig_argv[1:] if word != without)]


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "agent",
        "Runs for months on one node: registers it, runs the jobs scheduled there, drains on request.",
        "SIGTERM drains the node and ends the agent, SIGHUP reloads its configuration, SIGUSR2 replaces it by "
        "the installed version while jobs continue. Exit codes: 0 left on request, 2 usage, 75 this machine or the "
        "store keeps it from starting now. More: elasticd docs agent",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="agent.toml; otherwise defaults and ELASTICD_…")
    parser.add_argument(
        "--supervised", action="store_true", help="start the agent again whenever it ends abnormally: for containers"
    )
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # see installed_version_error
    return parser

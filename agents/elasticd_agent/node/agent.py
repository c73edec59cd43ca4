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
from elasticd_agent.config.agent_settings import Settings, load
from elasticd_agent.config.env_variables import FLAGS
from elasticd_agent.config.reload import merged as merged_settings
from elasticd_agent.config.store_options import meets, times
from elasticd_agent.model.job import Rendezvous
from elasticd_agent.model.version import version
from elasticd_agent.node import state_dir as statedir
from elasticd_agent.node.api.service import Desk
from elasticd_agent.node.api.setup import open_serving
from elasticd_agent.node.cleanup import Sweeper
from elasticd_agent.node.dashboard.routes import front
from elasticd_agent.node.health.events import tell
from elasticd_agent.node.health.monitor import Health, HealthChanged
from elasticd_agent.node.health.setup import open_health, renewed
from elasticd_agent.node.inventory import inventory
from elasticd_agent.node.journal import Telling
from elasticd_agent.node.loop import Asked, Deciding, Hint, Message, Parts
from elasticd_agent.node.metrics import NodeMetrics
from elasticd_agent.node.registration import Announcement
from elasticd_agent.node.runners.manager import Runners
from elasticd_agent.node.runners.spec_builder import Orders
from elasticd_agent.node.scheduler.scheduler import Placer
from elasticd_agent.node.scrape import merged, scraped
from elasticd_agent.node.sd_notify import Notifier, open_notifier
from elasticd_agent.store import Store
from elasticd_agent.store.file import KeptStore
from elasticd_agent.store.open import open_store
from elasticd_agent.system.addresses import joined, local_address
from elasticd_agent.system.nonblocking_writer import Outlet
from elasticd_agent.telemetry import events
from elasticd_agent.telemetry.console import PlainConsole
from elasticd_agent.telemetry.metrics_server import Pages, Verdict

KEPT = "store.journal"
TRY_S = 20.0
"""The deciding thread waits meanwhile, and systemd's watchdog may be as short as 30 s (deploy/systemd)."""
HEALTHY_TURN_S = 30.0
"""A deciding thread that has not turned for this long is stuck; its own timers are far shorter."""
_ASKED: Mapping[int, Asked] = {
    signal.SIGTERM: Asked("drain", "SIGTERM"),
    signal.SIGINT: Asked("drain", "SIGINT"),
    signal.SIGHUP: Asked("reload", "SIGHUP"),
    signal.SIGUSR2: Asked("replace", "SIGUSR2"),
}


def agent(argv: Sequence[str]) -> int:
    """Returns 0 once it has left because it was asked to; raises UsageError for what cannot work here."""
    asked = _parser().parse_args(argv)
    if asked.supervised:
        from elasticd_agent.node.supervisor import supervise

        return supervise(_again(without="--supervised"))

    def read() -> Settings:
        return _settings(asked)

    settings = read()
    faulthandler.enable()  # systemd's watchdog ends a daemon that hangs by SIGABRT: the journal has its stacks then
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    with heard_signals(inbox):
        with contextlib.ExitStack() as stack:
            notifier = open_notifier(os.environ)
            replaces = _run(settings, read, lambda: unfit(argv), inbox, notifier, stack)
        if replaces:
            _replace(notifier, inbox)
    return 0


def _run(
    settings: Settings,
    read: Callable[[], Settings],
    replaceable: Callable[[], str],
    inbox: queue.SimpleQueue[Message],
    notifier: Notifier,
    stack: contextlib.ExitStack,
) -> bool:
    """True: the process is to replace itself."""
    stack.enter_context(statedir.held(settings.state_dir))
    os.umask(0o077)
    outlet = Outlet(2)
    stack.callback(outlet.close)
    telling = Telling(PlainConsole(outlet, settings.node), settings.logs / "events.jsonl", settings.node)
    stack.callback(telling.close)
    where = meets(settings)
    store = _store(settings, telling)
    stack.callback(store.close)
    card = inventory(settings, statedir.incarnation(settings.state_dir, settings.node), os.environ)
    runners = Runners(settings.state_dir, lambda: inbox.put(Hint()), telling.said)
    stack.callback(runners.close)
    metrics = NodeMetrics(settings.node, version())
    announcement = Announcement(store, card, float(settings.lease_s), float(settings.renewal_s), metrics.lease)
    placer = Placer(
        store,
        card.node,
        card.incarnation,
        float(settings.lease_s),
        float(settings.renewal_s),
        float(settings.adopt_timeout_s),
        changed=lambda: inbox.put(Hint()),
        announce=announcement.beneath,
        keep_ended_s=float(settings.keep_ended_s),
    )
    health = open_health(settings, os.environ, idle=lambda: not runners.alive())
    stack.callback(health.close)
    parts = Parts(store, announcement, runners, placer, health, notifier, telling, inbox, card, metrics)
    orders = Orders(settings, where, settings.devices(os.environ))

    def reload(old: Settings) -> tuple[Settings, list[str]]:
        new, said = merged_settings(old, read())
        health.renew(renewed(new, os.environ))
        placer.adopt_timeout_s, placer.keep_ended_s = float(new.adopt_timeout_s), float(new.keep_ended_s)
        return new, said

    def changed(now: HealthChanged) -> None:
        tell(now, telling.happened)
        inbox.put(Hint())

    deciding = Deciding(parts, orders, reload, replaceable)
    serving = open_serving(
        lambda: deciding.settings,
        store,
        lambda desk: _pages(deciding, desk, metrics, health),
        lambda api, token, tls: front(api, token, version(), tls=tls),
    )
    stack.callback(serving.close)
    sweeper = Sweeper(settings.state_dir, deciding.needed, lambda: float(deciding.settings.keep_ended_s), telling.said)
    stack.callback(sweeper.close)
    deciding.addressed(_reached_at(settings, where, serving.address))
    adopted = deciding.adopt()
    health.start(changed)
    who = f"elasticd {version()}, pid {os.getpid()}"
    telling.happened(
        events.AgentStarted,
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
    telling.happened(events.AgentEnded, f"{who}: the agent of node {card.node} {how}", exit_code=code)
    return replaces


def _pages(deciding: Deciding, desk: Desk, metrics: NodeMetrics, health: Health) -> Pages:
    def page() -> bytes:
        node = deciding.card.node
        jobs = scraped(node, deciding.jobs(), desk.here.metrics)
        return merged([metrics.render(deciding.facts()), health.metrics(node), *jobs])

    def healthy() -> Verdict:
        late = deciding.overdue_s()
        return Verdict(late < HEALTHY_TURN_S, f"the deciding thread is {late:.0f} s late" if late > 1 else "it decides")

    def status() -> Mapping[str, Any]:
        return {**deciding.card.to_dict(), "joined": deciding.joined, "store_away": deciding.away}

    return Pages(metrics=page, status=status, healthy=healthy, ready=lambda: Verdict(*deciding.takes_part()))


def _reached_at(settings: Settings, where: Rendezvous, bound: tuple[str, int] | None) -> str:
    """HOST:PORT by which other nodes reach us, if they do."""
    if bound is None:
        return ""
    host, port = bound
    if host in ("0.0.0.0", "::"):
        host = settings.local_addr or (local_address(where.endpoints, None) if where.endpoints else "127.0.0.1")
    return joined(host, port)


def _store(settings: Settings, telling: Telling) -> Store:
    if settings.store.backend == "local":
        return KeptStore(settings.state_dir / KEPT, say=telling.warned)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # whom we fork execs at once; gRPC would complain about each
    return open_store(meets(settings), sys.executable, times(settings), telling.warned)[0]


# --- the process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def heard_signals(inbox: queue.SimpleQueue[Message]) -> Iterator[None]:
    """From here on signals are words. Those that came while this process was replacing itself are heard now."""

    def hear(signum: int, _: FrameType | None) -> None:
        inbox.put(_ASKED[signum])

    before = {signum: signal.signal(signum, hear) for signum in _ASKED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)  # what comes now is the next one's, or comes too late
        for signum, handler in before.items():
            signal.signal(signum, handler)


def unfit(arguments: Sequence[str] = ()) -> str:
    """Why what is installed now could not take over with these arguments; "" if it can. Takes a second; bounded.

    It reads the configuration as well: whoever takes over and then finds it wrong is gone, and its jobs with it.
    """
    program = (
        "import sys, elasticd_agent.cli.main, elasticd_agent.node.agent as it; "
        "sys.exit(getattr(it, 'wrong', lambda arguments: '')(sys.argv[1:]) or 0)"  # an older version does not say
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the version that is installed does not start: {error}"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return "" if done.returncode == 0 else f"the version that is installed does not start: {last}"


def wrong(argv: Sequence[str]) -> str:
    """Why an agent with these arguments would not start; "" if it would."""
    try:
        asked = _parser().parse_args(argv)
        _settings(asked)
    except UsageError as error:
        return str(error)
    return ""


def _settings(asked: argparse.Namespace) -> Settings:
    told = {flag: text for flag in FLAGS if (text := getattr(asked, flag[2:].replace("-", "_"))) is not None}
    return load(asked.config, os.environ, told)


def _replace(notifier: Notifier, inbox: queue.SimpleQueue[Message]) -> NoReturn:
    """Become what is installed now: same process, same children. Signals wait, blocked, until it listens.

    So do those that nobody has acted on: the stop that systemd asks for while this replaces itself must not be lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)
    numbers = {asked: signum for signum, asked in _ASKED.items()}
    with contextlib.suppress(queue.Empty):
        while True:
            if isinstance(unheard := inbox.get_nowait(), Asked) and unheard.what != "replace":
                signal.raise_signal(numbers[unheard])
    os.execve(sys.executable, _again(), {**os.environ, **notifier.inherited})


def _again(without: str = "") -> list[str]:
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
    for flag, key in FLAGS.items():
        parser.add_argument(
            flag, metavar={"--bind": "ADDR", "--port": "PORT"}.get(flag, "TIME"), help=f"instead of {key} in FILE"
        )
    parser.add_argument(
        "--supervised", action="store_true", help="start the agent again whenever it dies: for containers"
    )
    return parser

"""A real Prometheus, a real Alertmanager and a webhook, for tests: what they saw, and when the webhook heard of it.

    with watching(folder, rules) as watch:
        watch.scrape({"n1": 9411, "n2": 9412})
        heard = watch.fired("ElasticdJobHung", within=30)       # at the webhook
        watch.over("ElasticdJobHung", within=30)
        watch.query('elasticd_world_size{job_id="both"}')       # through Prometheus' API

Debian's binaries as `tests/install-servers system` unpacks them. They scrape and judge once a second, tell at once,
have no data from before, and are gone with all theirs when the context ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.etcd import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOYED = REPOSITORY / "deploy" / "prometheus"
UNPACKED = REPOSITORY / ".venv" / "prometheus" / "usr" / "bin"
_TEMPLATE = Path("/usr/share/prometheus/alertmanager/default.tmpl")  # Debian's alertmanager has none built in
SCRAPE_S = 1.0
_START_S = 30.0


def missing() -> str:
    """What these tests need and is not there; "" if it is."""
    lacks = [name for name in ("prometheus", "prometheus-alertmanager") if _binary(name) is None]
    if not lacks and not _TEMPLATE.exists():
        lacks = [str(_TEMPLATE)]
    return f"no {' and no '.join(lacks)}: tests/install-servers system fetches them" if lacks else ""


def _binary(name: str) -> str | None:
    unpacked = UNPACKED / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)


@dataclass(frozen=True, slots=True)
class Notice:
    """What the webhook was told of one alert. `at` is time.monotonic()."""

    name: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    at: float

    @property
    def severity(self) -> str:
        return self.labels.get("severity", "")

    def __str__(self) -> str:
        told = ", ".join(f"{k}={v}" for k, v in self.labels.items() if k != "alertname")
        return f"{self.at:.1f} {self.name} {self.status} ({told}): {self.annotations.get('summary', '')}"


@dataclass(slots=True)
class Watch:
    """`folder` holds everything the servers read and write; `heard` is what the webhook was told, in order."""

    folder: Path
    rules: Sequence[Path]
    inhibits: bool = False
    heard: list[Notice] = field(default_factory=list)
    _ports: list[int] = field(default_factory=lambda: free_ports(2))
    _servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _hook: HTTPServer | None = None
    _thread: threading.Thread | None = None

    # --- what it is told ------------------------------------------------------------------------------------------

    def scrape(self, agents: Mapping[str, int]) -> None:
        """Watch these agents (ports by node) and nobody else. Prometheus looks at the list every five seconds."""
        told = [{"targets": [f"127.0.0.1:{port}" for port in agents.values()]}]
        made = self.folder / "agents.json.new"
        made.write_text(json.dumps(told))
        made.replace(self.folder / "agents.json")
        self._until(lambda: self._scraped() == set(agents.values()), f"{agents} to be scraped", 30)
        # That there was nobody to scrape until now is an alert, too.
        self.over(within=30)
        self.heard.clear()

    def _scraped(self) -> set[int]:
        up = self.query("up == 1")
        return {int(one["metric"]["instance"].rpartition(":")[2]) for one in up}

    # --- what it says ---------------------------------------------------------------------------------------------

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """An instant vector."""
        more = {} if at is None else {"time": f"{at:.3f}"}
        return list(self.api("query", query=expression, **more)["result"])

    def range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        asked = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        return list(self.api("query_range", **asked)["result"])

    def api(self, what: str, **asked: str) -> Any:
        """The `data` of /api/v1/WHAT; fails with what Prometheus says is wrong with the query."""
        url = f"http://127.0.0.1:{self._ports[0]}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            return json.loads(_got(url))["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{what} {asked}: {error.read().decode()}") from None

    def alerts(self) -> list[dict[str, Any]]:
        """Those that are pending or firing now, as Prometheus sees it."""
        return list(self.api("alerts")["alerts"])

    def suppressed(self) -> set[str]:
        """Names of the alerts that Alertmanager keeps to itself, because another one says it already."""
        there = json.loads(_got(f"http://127.0.0.1:{self._ports[1]}/api/v2/alerts"))
        return {one["labels"]["alertname"] for one in there if one["status"]["state"] == "suppressed"}

    def patience(self, name: str, severity: str) -> float:
        """Seconds of `for` of that alert, as loaded."""
        rules = [rule for group in self.api("rules")["groups"] for rule in group["rules"]]
        named = [r for r in rules if r["name"] == name and r.get("labels", {}).get("severity") == severity]
        assert named, f"there is no {name} of severity {severity}"
        return max(float(rule["duration"]) for rule in named)

    # --- what the webhook heard -----------------------------------------------------------------------------------

    def fired(self, name: str, within: float, after: float = 0.0, **labels: str) -> Notice:
        """The first notice of such an alert, once it is there."""

        def look() -> Notice | None:
            for one in list(self.heard):
                if (
                    one.name == name
                    and one.status == "firing"
                    and one.at >= after
                    and labels.items() <= one.labels.items()
                ):
                    return one
            return None

        found: Notice = self._until(look, f"the webhook to hear of {name} {labels}", within)
        return found

    def over(self, *names: str, within: float) -> None:
        """Wait until none of these alerts (of all, without names) is pending or fires, and the webhook knows."""

        def look() -> bool:
            latest = {(n.name, tuple(sorted(n.labels.items()))): n.status for n in list(self.heard)}
            there = [name for (name, _), status in latest.items() if status == "firing"]
            there += [alert["labels"]["alertname"] for alert in self.alerts()]
            return not [name for name in there if not names or name in names]

        self._until(look, f"{names or 'all alerts'} to be over", within)

    def pages(self, after: float = 0.0) -> set[str]:
        """Names of the alerts that woke somebody."""
        return {n.name for n in list(self.heard) if n.status == "firing" and n.severity == "page" and n.at >= after}

    def told(self) -> str:
        now = [f"{a['labels']} {a['state']} since {a['activeAt']}" for a in self.alerts()]
        return "heard:\n  " + "\n  ".join(map(str, self.heard)) + "\nnow:\n  " + "\n  ".join(now)

    def _until(self, condition: Any, what: str, within: float) -> Any:
        deadline = time.monotonic() + within
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}\n{self.told()}"
            time.sleep(0.02)
        return found

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._listen()
        prometheus, alertmanager = (f"127.0.0.1:{port}" for port in self._ports)
        (self.folder / "alertmanager.yaml").write_text(json.dumps(_alertmanager(self._hook.server_port, self.inhibits)))
        (self.folder / "prometheus.yaml").write_text(json.dumps(_prometheus(self.folder, alertmanager, self.rules)))
        for nobody in ("agents.json", "runs.json"):
            (self.folder / nobody).write_text("[]")
        self._spawn(
            "prometheus-alertmanager",
            f"--config.file={self.folder}/alertmanager.yaml",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address={alertmanager}",
            "--cluster.listen-address=",
        )
        self._spawn(
            "prometheus",
            f"--config.file={self.folder}/prometheus.yaml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={prometheus}",
        )
        for server, address in zip(self._servers, (alertmanager, prometheus), strict=True):
            self._wait_until_ready(server, f"http://{address}/-/ready")

    def _spawn(self, name: str, *flags: str) -> None:
        program = _binary(name)
        assert program is not None, missing()
        # It ends with the thread that started it, however that ends.
        command = [*(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []), program, *flags]
        # GOMAXPROCS: what is watched needs the processors more.
        environment = {**os.environ, "GOMAXPROCS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._servers.append(
                subprocess.Popen([*command, "--log.level=warn"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 env=environment, cwd=self.folder)
            )  # fmt: skip

    def _wait_until_ready(self, server: subprocess.Popen[bytes], url: str) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
            assert server.poll() is None, f"{server.args!r} ended:\n{logs}"
            with contextlib.suppress(OSError):
                _got(url)
                return
            assert time.monotonic() < deadline, f"{url} not within {_START_S:g} s:\n{logs}"
            time.sleep(0.05)

    def _listen(self) -> None:
        heard = self.heard

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                now = time.monotonic()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for one in body["alerts"]:
                    name = one["labels"]["alertname"]
                    heard.append(Notice(name, one["status"], one["labels"], one["annotations"], now))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        # One connection, one request, one thread: HTTP/1.0.
        self._hook = HTTPServer(("127.0.0.1", 0), Hook)
        self._thread = threading.Thread(target=self._hook.serve_forever, args=(0.05,), name="webhook")
        self._thread.start()

    def close(self) -> None:
        for server in self._servers:
            server.kill()
        for server in self._servers:
            server.wait(20)
        if self._hook is not None and self._thread is not None:
            self._hook.shutdown()
            self._thread.join(20)
            self._hook.server_close()


@contextlib.contextmanager
def watching(rules: Sequence[Path], inhibits: bool = False) -> Iterator[Watch]:
    """Servers that are ready and watch nobody yet. `inhibits`: with the inhibit_rules of alertmanager.yaml."""
    folder = Path(tempfile.mkdtemp(prefix=f"elasticd-prometheus-{os.getpid()}-", dir="/dev/shm"))
    watch = Watch(folder, rules, inhibits)
    try:
        watch.start()
        yield watch
    finally:
        watch.close()
        shutil.rmtree(folder, ignore_errors=True)


def _prometheus(folder: Path, alertmanager: str, rules: Sequence[Path]) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yaml, but once a second, and with what is in `folder`. JSON is YAML."""
    told: dict[str, Any] = yaml.safe_load((DEPLOYED / "prometheus.yaml").read_text())
    told["global"] = {"scrape_interval": f"{SCRAPE_S:g}s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    told["rule_files"] = [str(path) for path in rules]
    told["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    for scrape in told["scrape_configs"]:
        for one in scrape["file_sd_configs"]:
            one["files"] = [str(folder / Path(file).name) for file in one["files"]]
    return told


def _alertmanager(port: int, inhibits: bool) -> dict[str, Any]:
    """Every alert by itself and at once, and once only: what is measured is not Alertmanager's patience."""
    route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    hook = {"url": f"http://127.0.0.1:{port}/", "send_resolved": True}
    told = yaml.safe_load((DEPLOYED / "alertmanager.yaml").read_text())
    return {
        "route": route | {"repeat_interval": "4h"},
        "receivers": [{"name": "hook", "webhook_configs": [hook]}],
        "inhibit_rules": told["inhibit_rules"] if inhibits else [],
    }


def _got(url: str) -> bytes:
    # A proxy set in the environment is not meant for loopback.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body

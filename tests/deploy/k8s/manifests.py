"""deploy/k8s as a cluster would get it: rendered, and asked what it says of containers, volumes and names."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.k8s import kustomize

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "deploy" / "k8s"
PAGE = ROOT / "docs" / "kubernetes.md"
OVERLAYS = ("etcd", "external-etcd", "c10d", "prometheus", "rdma", "host-network")
DAEMONS = tuple(name for name in OVERLAYS if name != "c10d")
"""Those whose pods run `elasticd agent`."""


def _kubectl() -> str | None:
    """The real one, if there is one whose kustomize knows components: Debian 12's does not."""
    if "STANDIN_KUBECTL" in os.environ:  # the test that started this has looked
        return os.environ["STANDIN_KUBECTL"] or None
    found = shutil.which("kubectl")
    if not found:
        return None
    said = subprocess.run([found, "version", "--client"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r'(?:Client Version: v|GitVersion:"v)(\d+)\.(\d+)', said)
    return found if version and (int(version[1]), int(version[2])) >= (1, 27) else None


KUBECTL = _kubectl()
OURS = "elasticd:0.1.0"
"""The image whose entry point is `elasticd`."""

Object = dict[str, Any]


@functools.cache
def rendered(path: str) -> tuple[Object, ...]:
    """Every object of the kustomization at deploy/k8s/`path`; what kubectl complains of fails."""
    return tuple(render(K8S / path))


def render(path: Path) -> list[Object]:
    """By kubectl; where there is none, by what of kustomize is in kustomize.py."""
    return by_kubectl(path) if KUBECTL else kustomize.build(path)


def by_kubectl(path: Path) -> list[Object]:
    assert KUBECTL
    done = subprocess.run([KUBECTL, "kustomize", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), f"{path}: {done.stderr}"
    return objects(done.stdout)


def objects(text: str) -> list[Object]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


def overlay(name: str) -> tuple[Object, ...]:
    return rendered(f"overlays/{name}")


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def one(objects: Sequence[Object], kind: str, name: str | None = None) -> Object:
    found = [o for o in of_kind(objects, kind) if name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{kind} {name}: {[o['metadata']['name'] for o in found]}"
    return found[0]


@dataclass(frozen=True, slots=True)
class Pod:
    """The pods of one workload."""

    owner: Object
    spec: Mapping[str, Any]
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def container(self, name: str) -> Object:
        return next(c for c in self.containers if c["name"] == name)

    @property
    def volumes(self) -> dict[str, Object]:
        own = {v["name"]: v for v in self.spec.get("volumes", ())}
        return own | {c["metadata"]["name"]: c for c in self.owner["spec"].get("volumeClaimTemplates", ())}


def pods(objects: Sequence[Object]) -> list[Pod]:
    found = of_kind(objects, "DaemonSet", "StatefulSet", "Deployment", "Job")
    return [Pod(o, o["spec"]["template"]["spec"], o["spec"]["template"]["metadata"].get("labels", {})) for o in found]


def agents(objects: Sequence[Object]) -> Pod:
    return next(pod for pod in pods(objects) if pod.name == "DaemonSet elasticd-agent")


def expanded(container: Mapping[str, Any], values: Mapping[str, str]) -> list[str]:
    """Its arguments as the kubelet gives them: $(NAME) is a variable. `values` are those of field references."""
    known = {e["name"]: e.get("value", values.get(e["name"], "")) for e in container.get("env", ())}
    return [re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), word) for word in container.get("args", ())]


def accepted(words: Sequence[str]) -> str:
    """Have the real command line's parser read `elasticd words…`; its command. Raises UsageError, SystemExit.

    Each is imported when it is needed: what stands in for a cluster starts often.
    """
    command, *rest = words
    match command:
        case "agent":
            from elasticd_daemon import agent

            agent.build_parser().parse_args(rest)
        case "store":
            from elasticd_agent.cli import store_server as apart

            apart.build_parser().parse_args(rest)
        case "run":
            from elasticd_agent.config import run_options as arguments

            arguments.parse_run(rest, {}, Path("/"))
        case "config":
            assert rest[0] in ("check", "example"), rest
        case _:
            from elasticd_daemon.cli import job_commands as verbs

            verbs.build_parser(command).parse_args(rest)
    return command


def mounted(container: Mapping[str, Any], path: str) -> Object | None:
    """The volumeMount that has `path`: the innermost."""
    above = [m for m in container["volumeMounts"] if path == m["mountPath"] or path.startswith(m["mountPath"] + "/")]
    return max(above, key=lambda m: len(m["mountPath"]), default=None)


def writable(pod: Pod, container: Mapping[str, Any]) -> set[str]:
    volatile = {n for n, v in pod.volumes.items() if not {"configMap", "secret"} & set(v)}
    return {m["mountPath"] for m in container["volumeMounts"] if m["name"] in volatile and not m.get("readOnly")}


def blocks(page: Path = PAGE) -> list[str]:
    """The shell blocks of a page of documentation, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def secrets_of(calls: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """Name → key → file, of what `kubectl create secret generic` was given."""
    found: dict[str, dict[str, str]] = {}
    for words in calls:
        if "secret" in words and words[words.index("secret") + 1] == "generic":
            name = words[words.index("secret") + 2]
            given = (w.removeprefix("--from-file=").partition("=") for w in words if w.startswith("--from-file="))
            found[name] = {key: file for key, _, file in given}
    return found


def kubectl_calls(text: str) -> Iterator[list[str]]:
    """Every kubectl command in shell text, continuation lines joined. Here-documents hold none."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("kubectl "):
            yield shlex.split(line.split("|")[0], comments=True)

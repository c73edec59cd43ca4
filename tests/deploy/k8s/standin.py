"""Stands on PATH for kubectl and others that a cluster or a registry would answer: tells what it was asked, checks it.

`standin.py NAME arguments…`. Each call is a line of JSON in $STANDIN_CALLS. What a cluster would refuse is refused,
with a sentence on stderr and exit code 1: a manifest that its schema does not have, a Secret of a file that is not
there, a name of nothing that was applied, an option that the real command does not have. What was applied is kept
beside the calls.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from elasticd.errors import UsageError
from tests.deploy.k8s import manifests

CALLS = Path(os.environ["STANDIN_CALLS"])
APPLIED = CALLS.with_suffix(".applied")
NEWEST = "1.37"
_VALUED = ("-n", "--namespace", "-f", "-k", "-o", "--timeout", "--for")


class Refused(Exception):
    pass


def main(name: str, words: Sequence[str]) -> int:
    with CALLS.open("a") as file:
        file.write(json.dumps([name, *words]) + "\n")
    try:
        _STOOD_IN[name](words)
    except (Refused, UsageError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


# --- kubectl ----------------------------------------------------------------------------------------------------------


def kubectl(words: Sequence[str]) -> None:
    verb, *rest = (word for word in _without_options(words[: words.index("--")] if "--" in words else words))
    known: dict[str, Callable[[Sequence[str], Sequence[str]], None]] = {
        "kustomize": lambda plain, _: show(plain),
        "apply": apply,
        "create": create,
        "replace": replace,
        "rollout": lambda plain, _: must_exist(plain[1]),
        "wait": lambda plain, _: must_exist(plain[0]),
        "logs": lambda plain, _: must_exist(plain[0]),
        "delete": delete,
        "port-forward": port_forward,
        "drain": node,
        "uncordon": node,
        "label": label,
        "get": lambda plain, _: [must_exist(kind) for kind in plain[0].split(",")] and None,
        "exec": lambda plain, _: execute(plain[0], words[words.index("--") + 1 :]),
    }
    if verb not in known:
        raise Refused(f"{verb!r} is nothing that the page should ask")
    if verb not in ("kustomize", "apply", "replace", "drain", "uncordon", "label") and not {"-n", "-k"} & set(words):
        raise Refused(f"{verb} without -n elasticd asks another namespace")
    known[verb](rest, words)


def _without_options(words: Sequence[str]) -> list[str]:
    plain, skip = [], False
    for word in words:
        if not skip and not word.startswith("-"):
            plain.append(word)
        skip = word in _VALUED and not skip
    return plain


def show(plain: Sequence[str]) -> None:
    import yaml

    print(yaml.safe_dump_all(manifests.render(Path(plain[0]))))


def apply(_: Sequence[str], words: Sequence[str]) -> None:
    import kubernetes_validate

    if "-k" in words:
        found = manifests.render(Path(words[words.index("-k") + 1]))
    else:
        found = manifests.objects(Path(words[words.index("-f") + 1]).read_text())
    kept = applied()
    coming = {f"namespace/{one['metadata']['name']}" for one in found if one["kind"] == "Namespace"}
    for one in found:
        kind, name = one["kind"], one["metadata"]["name"]
        try:
            if kind not in ("PodMonitor", "PrometheusRule"):
                kubernetes_validate.validate(one, NEWEST, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(f"{kind} {name}: {error.message}") from None
        space = one["metadata"].get("namespace")
        if space is not None and f"namespace/{space}" not in kept | coming:
            raise Refused(f"{kind} {name}: there is no namespace {space}")
        kept |= {f"{kind.lower()}/{name}", f"{kind.lower()}s"}
    for pod in manifests.pods(found):
        for container in pod.containers:
            if "elasticd" in container["image"] and f"image/{container['image']}" not in kept:
                raise Refused(f"{pod.name}: ImagePullBackOff: nobody has pushed {container['image']}")
        selected = {f"label/{name}={value}" for name, value in pod.spec.get("nodeSelector", {}).items()}
        if not selected <= kept:
            raise Refused(f"{pod.name}: no node has {selected - kept}")
    for pod in manifests.pods(found):
        for volume in pod.volumes.values():
            secret = volume.get("secret", {}).get("secretName")
            if secret is not None and f"secret/{secret}" not in kept:
                raise Refused(f"{pod.name}: there is no Secret {secret}; its pods would wait for it")
    APPLIED.write_text(json.dumps(sorted(kept)))


def create(plain: Sequence[str], words: Sequence[str]) -> None:
    if plain[:2] != ["secret", "generic"]:
        raise Refused(f"create {plain[0]}: the page creates Secrets")
    if "namespace/elasticd" not in applied():
        raise Refused("there is no namespace elasticd yet")
    for key, file in manifests.secrets_of([words])[plain[2]].items():
        if not Path(file).read_bytes().strip():
            raise Refused(f"{key}: {file} is empty")
    if "--dry-run=client" in words:
        print(json.dumps({"kind": "Secret", "metadata": {"name": plain[2]}}))
    elif f"secret/{plain[2]}" in applied():
        raise Refused(f"secrets {plain[2]!r} already exists")
    else:
        APPLIED.write_text(json.dumps(sorted({*applied(), f"secret/{plain[2]}"})))


def replace(_: Sequence[str], words: Sequence[str]) -> None:
    if words[words.index("-f") + 1] != "-":
        raise Refused("the page replaces what it has just made")
    found = json.load(sys.stdin)
    must_exist(f"{found['kind'].lower()}/{found['metadata']['name']}")


def delete(plain: Sequence[str], words: Sequence[str]) -> None:
    if "-k" in words:
        found = manifests.render(Path(words[words.index("-k") + 1]))
        names = {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in found}
    else:
        names = {f"{plain[0]}/{plain[1]}"}
    for name in names if "--ignore-not-found" not in words else ():
        must_exist(name)
    APPLIED.write_text(json.dumps(sorted(applied() - names)))


def must_exist(name: str) -> None:
    if name.lower() not in applied():
        raise Refused(f"there is no {name}; there are {', '.join(sorted(applied()))}")


def port_forward(plain: Sequence[str], _: Sequence[str]) -> None:
    must_exist(plain[0])
    if plain[1] != "9411:9411":
        raise Refused(f"{plain[1]}: nobody listens there")
    signal.sigtimedwait([signal.SIGTERM], 60)  # as the real one, until it is stopped


def node(plain: Sequence[str], words: Sequence[str]) -> None:
    if "drain" in words and "--ignore-daemonsets" not in words:
        raise Refused(f"node {plain[0]} has pods of DaemonSets; --ignore-daemonsets leaves them there")


def label(plain: Sequence[str], _: Sequence[str]) -> None:
    *nodes, pair = plain[1:]
    if plain[0] != "node" or not nodes or "=" not in pair:
        raise Refused("kubectl label node NODE… NAME=VALUE")
    APPLIED.write_text(json.dumps(sorted({*applied(), f"label/{pair}"})))


def execute(where: str, inside: Sequence[str]) -> None:
    must_exist(where)
    if inside[0] != "elasticd":
        raise Refused(f"{inside[0]} may not be in the image")
    manifests.accepted(inside[1:])


def applied() -> set[str]:
    return set(json.loads(APPLIED.read_text())) if APPLIED.exists() else set()


# --- the others -------------------------------------------------------------------------------------------------------


def elasticd(words: Sequence[str]) -> None:
    manifests.accepted(words)
    for flag in ("--token-file", "--ca"):
        if flag in words and not Path(words[words.index(flag) + 1]).is_file():
            raise Refused(f"{flag}: no such file")


def curl(words: Sequence[str]) -> None:
    if not Path(words[words.index("--cacert") + 1]).is_file():
        raise Refused("--cacert: no such file")
    if words[-1] != "https://localhost:9411/metrics":
        raise Refused(f"{words[-1]} is no page of an agent's")
    print('elasticd_step{job_id="sample",node="gpu-1"} 1')


def podman(words: Sequence[str]) -> None:
    if words[0] == "build":
        file = Path(words[words.index("-f") + 1])
        given = [words[n + 1].partition("=")[0] for n, word in enumerate(words) if word == "--build-arg"]
        taken = file.read_text()
        if missing := [name for name in given if f"ARG {name}" not in taken]:
            raise Refused(f"{file} has no build argument {missing[0]}")
    if words[0] == "push":
        APPLIED.write_text(json.dumps(sorted({*applied(), f"image/{words[1]}"})))


_STOOD_IN: dict[str, Callable[[Sequence[str]], object]] = {
    "kubectl": kubectl,
    "elasticd": elasticd,
    "podman": podman,
    "curl": curl,
    "less": lambda words: sys.stdin.read(),
    "sleep": lambda words: None,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

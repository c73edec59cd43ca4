"""As much of kustomize as deploy/k8s uses, for machines without kubectl. A test compares the two where there is one.

It refuses what it does not know, so that it is never wrong quietly.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_KNOWN = {
    *("apiVersion", "kind", "namespace", "labels", "resources", "components", "configMapGenerator", "patches", "images")
}
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""How the items of a list are told apart when two are merged (Kubernetes' patchMergeKey); other lists are replaced."""
_NOWHERE = {
    *("Namespace", "PriorityClass", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
}
"""Kinds that are in no namespace."""


def build(folder: Path) -> list[Object]:
    """The objects of the kustomization in `folder`."""
    return _named(_built(folder, []))


def _built(folder: Path, before: list[Object]) -> list[Object]:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(asked) - _KNOWN:
        raise NotImplementedError(f"{folder}: {unknown}")
    found = before
    for name in asked.get("resources", ()):
        path = folder / name
        found += _built(path, []) if path.is_dir() else [o for o in yaml.safe_load_all(path.read_text()) if o]
    for name in asked.get("components", ()):
        found = _built(folder / name, found)
    for one in asked.get("configMapGenerator", ()):
        found = _generated(folder, one, found)
    for patch in asked.get("patches", ()):
        found = _patched(folder, patch, found)
    for one in found:
        for pairs in (entry["pairs"] for entry in asked.get("labels", ())):
            one["metadata"].setdefault("labels", {}).update(pairs)
        if "namespace" in asked and one["kind"] not in _NOWHERE:
            one["metadata"]["namespace"] = asked["namespace"]
        for image in asked.get("images", ()):
            _tagged(one, image)
    return found


def _generated(folder: Path, asked: Mapping[str, Any], found: list[Object]) -> list[Object]:
    options = asked.get("options", {})
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": asked["name"], **({"labels": options["labels"]} if "labels" in options else {})},
        "data": {name: (folder / name).read_text() for name in asked["files"]},
    }
    if not options.get("disableNameSuffixHash"):
        made["hashed"] = True
    if asked.get("behavior") == "replace":
        old = next(o for o in found if _who(o) == ("ConfigMap", asked["name"]))
        old["data"] = made["data"]
        return found
    return [*found, made]


def _named(found: list[Object]) -> list[Object]:
    """A hash at the end of the names of generated maps, and where they are used. kustomize's own is another one."""
    for one in found:
        if one.pop("hashed", False):
            name = one["metadata"]["name"]
            end = hashlib.sha256(repr(sorted(one["data"].items())).encode()).hexdigest()[:10]
            one["metadata"]["name"] = f"{name}-{end}"
            _renamed(found, name, f"{name}-{end}")
    return found


def _renamed(value: Any, name: str, new: str) -> None:
    if isinstance(value, dict):
        if isinstance(value.get("configMap"), dict) and value["configMap"].get("name") == name:
            value["configMap"]["name"] = new
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        _renamed(inner, name, new)


def _tagged(value: Any, image: Mapping[str, str]) -> None:
    if isinstance(value, dict):
        name, colon, _ = str(value.get("image", "")).rpartition(":")
        if colon and name == image["name"]:
            value["image"] = f"{image.get('newName', name)}:{image['newTag']}"
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        _tagged(inner, image)


# --- patches ----------------------------------------------------------------------------------------------------------


def _patched(folder: Path, asked: Mapping[str, Any], found: list[Object]) -> list[Object]:
    text = asked["patch"] if "patch" in asked else (folder / asked["path"]).read_text()
    patch = yaml.safe_load(text)
    if isinstance(patch, list):
        for one in found:
            kind, name = _who(one)
            if kind == asked["target"]["kind"] and re.fullmatch(asked["target"]["name"], name):
                for step in patch:
                    _step(one, step)
        return found
    if patch.pop("$patch", None) == "delete":
        return [one for one in found if _who(one) != _who(patch)]
    target = next(one for one in found if _who(one) == _who(patch))
    merged = _merged(target, patch)
    return [merged if one is target else one for one in found]


def _step(one: Object, step: Mapping[str, Any]) -> None:
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
    inner: Any = one
    try:
        for part in way:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
    except (KeyError, IndexError):
        raise ValueError(f"{_who(one)} has no {step['path']}") from None
    match step["op"], inner:
        case "add", list() if last == "-":
            inner.append(copy.deepcopy(step["value"]))
        case "replace", list() if last.isdecimal() and int(last) < len(inner):
            inner[int(last)] = copy.deepcopy(step["value"])
        case (("add" | "replace"), dict()):
            inner[last] = copy.deepcopy(step["value"])
        case _:
            raise NotImplementedError(step)


def _merged(old: Any, new: Any, name: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        found = dict(old)
        for key, value in new.items():
            found[key] = _merged(old[key], value, key) if key in old else value
        return found
    if isinstance(old, list) and isinstance(new, list) and (key := _KEYS.get(name)):
        by_key = {item[key]: item for item in new}
        kept = [
            _merged(item, by_key[item[key]]) if item[key] in by_key else item
            for item in old
            if by_key.get(item[key], {}).get("$patch") != "delete"
        ]
        there = {item[key] for item in old}
        # What is new comes first, as kustomize has it.
        return [*(item for item in new if item[key] not in there), *kept]
    return new


def _who(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]

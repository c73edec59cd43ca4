"""What all nodes of one job must have been asked alike, and how to say where two of them differ.

It exists so that a node started with another script, or with other arguments, is refused with the field that differs,
instead of training something else beside the others. What is a machine's own affair is left out: its slots, its
interpreter's and its script's directory, where it writes, its name and its addresses. Nothing here talks to a store.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath
from typing import Any

from elasticd_agent.config import JobSpec, Mode

_SPOKEN = {
    "entrypoint": "the script",
    "args": "the script's arguments",
    "mode": "how the script is started",
    "role": "--role",
    "run": "--run",
    "min_nodes": "--nnodes MIN",
    "max_nodes": "--nnodes MAX",
}
_SHOWN = 100
"""Characters of a value that are shown: a sentence must stay one line."""


def spec_document(spec: JobSpec) -> dict[str, Any]:
    """The fields all nodes share, as JSON can carry them."""
    module = spec.mode is Mode.MODULE
    return {
        "entrypoint": spec.entrypoint if module else PurePath(spec.entrypoint).name,
        "args": list(spec.args),
        "mode": spec.mode.value,
        "role": spec.role,
        "min_nodes": spec.rendezvous.min_nodes,
        "max_nodes": spec.rendezvous.max_nodes,
        "run": spec.run,
    }


def digest(spec: JobSpec) -> str:
    """16 hex digits that are equal on two nodes when their documents are.

    A version whose documents have more fields has other digests: where digests differ, `differences` decides.
    """
    canonical = json.dumps(spec_document(spec), sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()[:16]


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One phrase naming every field in which two documents differ: "the script is 'a.py' here, 'b.py' there"; or "".

    A field only one of them knows is another version's and differs for nobody.
    """
    return "; ".join(
        _difference(name, mine[name], theirs[name]) for name in mine if name in theirs and mine[name] != theirs[name]
    )


def _difference(name: str, mine: Any, theirs: Any) -> str:
    texts = [shlex.join(map(str, value)) if isinstance(value, list) else value for value in (mine, theirs)]
    if all(isinstance(text, str) for text in texts):
        # Of long ones, what is shown is where they part.
        parted = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        texts = [repr(_cut(text, parted)) for text in texts]
    label = _SPOKEN.get(name, name)
    return f"{label} {'are' if name == 'args' else 'is'} {texts[0]} here, {texts[1]} there"


def _cut(text: str, parted: int) -> str:
    if len(text) <= _SHOWN:
        return text
    begin = max(0, parted - _SHOWN // 2)
    end = begin + _SHOWN
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")

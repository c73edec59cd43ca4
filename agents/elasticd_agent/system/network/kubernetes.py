"""The Kubernetes API as a pod sees it: objects read and patched by its service account, and what marks a node as ill.

Preemption notices and the health checks of the service read nodes with the same rules: a taint is given as KEY or
KEY:EFFECT, a condition as TYPE, all with * as in shells.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def get(base: str, path: str) -> dict[str, Any]:
    """An object. Raises OSError, ValueError."""
    return _request_object(base, path)


def patch(base: str, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """The object after a strategic merge patch. Raises OSError, ValueError."""
    return _request_object(base, path, "PATCH", json.dumps(change).encode())


def find_taint(node: Mapping[str, Any], patterns: Sequence[str], tolerations: Sequence[Mapping[str, Any]] = ()) -> str:
    """The first taint of the node that one of the patterns names and nothing tolerates; "" if there is none."""
    for taint in node.get("spec", {}).get("taints", []):
        if any(_tolerates(toleration, taint) for toleration in tolerations):
            continue
        if any(_taint_matches(taint["key"], taint["effect"], pattern) for pattern in patterns):
            return f"{taint['key']}:{taint['effect']}"
    return ""


def find_true_condition(node: Mapping[str, Any], patterns: Sequence[str]) -> str:
    """The first condition of the node that is true and named by a pattern, with its message; "" if there is none."""
    for condition in node.get("status", {}).get("conditions", []):
        if condition["status"] == "True" and any(fnmatchcase(condition["type"], pattern) for pattern in patterns):
            why = condition.get("message") or condition.get("reason") or "it is True"
            return f"{condition['type']}: {why}"
    return ""


def _taint_matches(key: str, effect: str, pattern: str) -> bool:
    key_pattern, _, effect_pattern = pattern.partition(":")
    return fnmatchcase(key, key_pattern) and effect_pattern in ("", effect)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """True if the toleration is for this taint, by the rule of Kubernetes: no key is every key, no effect every one."""
    fits = all(toleration.get(name) in (None, "", taint[name]) for name in ("key", "effect"))
    return fits and (
        toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")
    )


def http_request(
    url: str,
    headers: Mapping[str, str],
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    body: bytes | None = None,
) -> bytes:
    """The answer's body, empty for 404: the service has nothing to say. No proxy is asked. Raises OSError."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    asked = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as reply:
            answer: bytes = reply.read(MAX_ANSWER_BYTES)
            return answer
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 404:
                raise
        return b""
    except http.client.HTTPException as error:  # no HTTP, or an answer that ends in the middle
        raise OSError(f"{url}: {type(error).__name__}: {error}") from None


def _request_object(base: str, path: str, method: str = "GET", body: bytes | None = None) -> dict[str, Any]:
    token = (SERVICE_ACCOUNT_DIR / "token").read_text(encoding="ascii").strip()  # it is replaced while the pod runs
    context = None
    if base.startswith("https:"):
        context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT_DIR / "ca.crt"))
    headers = {"Authorization": f"Bearer {token}"}
    if body is not None:
        headers["Content-Type"] = "application/strategic-merge-patch+json"
    answer = http_request(base + path, headers, method, context, body)
    if not answer:
        raise ValueError(f"there is no {path}")
    told: dict[str, Any] = json.loads(answer)
    return told

"""The audit log, `<logs>/audit.jsonl`: who changed something, who read logs, and who was denied access.

It stands in front of the routes, so no request is missed. A caller that repeats the same reading, as `elasticd logs
--follow` does, gets one line a minute, and so do a caller that names what does not exist, whatever it is, and a token
that is denied the same request; and an address or a local user without credentials that is denied whatever it asks
for, also at the login.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from elasticd_agent.model.log_events import AuditEvent
from elasticd_agent.system.network.http_auth import AccessDenied
from elasticd_agent.system.network.http_server import HttpError, HttpRequest, HttpResponse, Routes
from elasticd_agent.telemetry.event_log import EventSink

REPEAT_INTERVAL_S = 60.0
MAX_REMEMBERED_REQUESTS = 1024
DENIED_ACTION = "denied"
ACTIONS = ("submit", "cancel", "dump", "cordon", "drain", "uncordon", "login", "read", DENIED_ACTION)
MAX_TARGET_CHARS = 200


@dataclass(slots=True)
class AuditedRoutes:
    """`count_action` is called with the action of each line. Safe to call from many threads at once."""

    routes: Routes
    log: EventSink
    count_action: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written_at: OrderedDict[tuple[str, str, str], float] = field(default_factory=OrderedDict)

    def is_public(self, method: str, path: str) -> bool:
        return self.routes.is_public(method, path)

    def admit_or_reject(self, request: HttpRequest, denied: AccessDenied) -> str | HttpResponse:
        answer = self.routes.admit_or_reject(request, denied)
        if isinstance(answer, HttpResponse):
            target, caller = f"{request.method} {request.path}", denied.caller
            # Nobody can flood the log with invented paths: of the same action, whatever its target, there is one line.
            audited = action_and_target(request.method, request.path)
            repetition_key = audited[0] if audited is not None and caller is not None and caller.host else ""
            self._record(
                str(caller or request.client_host),
                DENIED_ACTION,
                target,
                answer.status,
                denied.why,
                repetition_key=repetition_key,
            )
        return answer

    def answer(self, request: HttpRequest) -> HttpResponse:
        status, body = 500, b""
        try:
            answer = self.routes.answer(request)
            status, body = answer.status, answer.body
            return answer
        except HttpError as error:
            status = error.status
            raise
        finally:
            self._record_request(request, status, body)

    def _record_request(self, request: HttpRequest, status: int, body: bytes) -> None:
        audited = action_and_target(request.method, request.path)
        if audited is None:
            return
        action, target = audited
        if action == "submit" and status == 201:
            target = json.loads(body)["job"]
        by = request.requested_by or request.client_host
        is_repeatable = action == "read" or (action == "login" and status >= 400)
        # Of names that are nobody's there are as many as somebody likes.
        repetition_key = "" if status == 404 else target if is_repeatable else None
        self._record(by, action, target, status, repetition_key=repetition_key)

    def _record(
        self, by: str, action: str, target: str, status: int, why: str = "", *, repetition_key: str | None
    ) -> None:
        """A line is a repetition of another one with this `repetition_key`, caller and action; None: it never is."""
        now = self.clock()
        if repetition_key is not None:
            with self._lock:
                key = (by, action, repetition_key)
                if now < self._written_at.get(key, float("-inf")) + REPEAT_INTERVAL_S:
                    return
                self._written_at[key] = now
                self._written_at.move_to_end(key)
                while len(self._written_at) > MAX_REMEMBERED_REQUESTS:
                    self._written_at.popitem(last=False)
        target = ascii(target)[1:-1][:MAX_TARGET_CHARS]
        sentence = f"{by}: {action} {target}: {status}" + (f", {why}" if why else "")
        self.log.write(
            AuditEvent(
                round=0, mono=time.monotonic(), reason=sentence, by=by, action=action, target=target, status=status
            )
        )
        self.count_action(action)


def action_and_target(method: str, path: str) -> tuple[str, str] | None:
    """The action and its target; None for a request that is not recorded."""
    words = [unquote(word, errors="replace") for word in path.split("/")[1:]]
    if words[:2] == ["v1", "local"]:
        words = ["v1", *words[2:]]
    match method, words:
        case "POST", ["v1", "jobs"]:
            return "submit", ""
        case "POST", ["v1", "jobs" | "nodes", target, action] | ["jobs" | "nodes", target, action] if action in ACTIONS:
            return action, target
        case "POST" | "GET", ["login"]:
            return "login", ""
        case "POST", ["v1", "login"]:  # the code for a browser
            return "login", "code"
        case "GET", ["v1", "jobs", target, "logs" | "explain"] | ["jobs", target, *_]:
            return "read", target
    return None

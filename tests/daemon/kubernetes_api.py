"""A stand-in of the Kubernetes API with one node."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme


class Api(ThreadingHTTPServer):
    """One node, as the API server has it: RBAC lets the account read it and patch its status."""

    daemon_threads = True

    def __init__(self, name: str, certificates: trustme.CA) -> None:
        self.path = f"/api/v1/nodes/{name}"
        self.node: dict[str, Any] = {
            "metadata": {"name": name},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "GpuMemWatch", "status": "False"}]},
        }
        self.patches: list[dict[str, Any]] = []
        self.forbidden: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificates.issue_cert("127.0.0.1").configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def variables(self) -> dict[str, str]:
        """Those that a pod has."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.server_port)}

    def set(self, condition: str, status: str, message: str = "") -> None:
        self._merge({"type": condition, "status": status, "message": message})

    def condition(self, name: str) -> dict[str, Any]:
        return next((one for one in self.node["status"]["conditions"] if one["type"] == name), {})

    def patch(self, change: dict[str, Any]) -> None:
        """A strategic merge: conditions are merged by their type."""
        assert list(change) == ["status"]
        self.patches.append(change)
        for one in change["status"]["conditions"]:
            self._merge(one)

    def _merge(self, new: dict[str, Any]) -> None:
        conditions = self.node["status"]["conditions"]
        others = [one for one in conditions if one["type"] != new["type"]]
        conditions[:] = [*others, {**self.condition(new["type"]), **new}]


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self._answer(self.server.path)

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._answer(f"{self.server.path}/status", body):
            assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"

    def _answer(self, path: str, change: dict[str, Any] | None = None) -> bool:
        allowed = self.headers["Authorization"] == "Bearer secret" and self.command not in self.server.forbidden
        self.send_response(403 if not allowed else 200 if self.path == path else 404)
        self.end_headers()
        if allowed and self.path == path:
            if change is not None:
                self.server.patch(change)
            self.wfile.write(json.dumps(self.server.node).encode())
        return allowed

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(name: str, account: Path) -> Iterator[Api]:
    """The API of a cluster with this node; the files of a service account that it knows are put into `account`."""
    certificates = trustme.CA()
    certificates.cert_pem.write_to_path(account / "ca.crt")
    (account / "token").write_text("secret\n")
    with Api(name, certificates) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

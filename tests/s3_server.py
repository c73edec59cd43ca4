"""An S3 server, moto's, in a process of its own, which fails as it is told: `python -m tests.s3_server PORT`.

POST /-/faults adds a fault, a JSON object: {do, method, path, count, seconds}. `path` is searched for in the path and
query. The answer, also of GET, lists how often each fault did its work.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from elasticd_agent.system.processes.process import PR_SET_PDEATHSIG, prctl

BUCKET = "bucket"
KEY = "AKIA-of-a-test"
_WRONG = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key you provided does not exist</Message></Error>"
_SLOW = b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"
ROOT = Path(__file__).resolve().parents[1]


class Faults:
    """A WSGI application around moto's."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._faults: list[dict[str, Any]] = []
        self._put_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        if path.startswith("/-/"):
            if method == "POST":
                fault = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                if fault["do"] == "clear":
                    self._faults.clear()
                    fault["count"] = 0
                self._faults.append({"method": "", "path": "", "count": 1, "seconds": 0.0, "hits": 0, **fault})
            start("200 OK", [])
            return [json.dumps([each["hits"] for each in self._faults]).encode()]
        if "HTTP_AUTHORIZATION" in environ and KEY not in environ["HTTP_AUTHORIZATION"]:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [_WRONG]
        hides = 0.0
        with self._lock:
            fault = next((each for each in self._faults if self._fits(each, method, path)), None)
            if fault is not None:
                fault["hits"] += 1
            if method in ("PUT", "POST"):
                self._put_at.setdefault(environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"), time.monotonic())
        if fault is not None:
            time.sleep(fault["seconds"] if fault["do"] == "delay" else 0)
            if fault["do"] == "cut":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
            if fault["do"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault["do"] == "403":
                start("403 Forbidden", [("Content-Type", "application/xml")])
                return [_WRONG]
            if fault["do"] in ("500", "503"):
                start(f"{fault['do']} Slow Down", [("Content-Type", "application/xml")])
                return [_SLOW]
            if fault["do"] == "lost answer":
                b"".join(self._application(environ, lambda *_: None))
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
            hides = fault["seconds"] if fault["do"] == "hide" else 0.0
        answer = self._application(environ, start)
        return [self._without_new(b"".join(answer), hides)] if hides else answer

    @staticmethod
    def _fits(fault: dict[str, Any], method: str, path: str) -> bool:
        return (
            fault["hits"] < fault["count"] and fault["method"] in ("", method) and bool(re.search(fault["path"], path))
        )

    def _without_new(self, listing: bytes, seconds: float) -> bytes:
        """A listing without the objects that are not so old."""

        def kept(found: re.Match[bytes]) -> bytes:
            put_at = self._put_at.get(found[1].decode(), 0.0)
            return found[0] if time.monotonic() - put_at > seconds else b""

        return re.sub(rb"<Contents>\s*<Key>(.*?)</Key>.*?</Contents>", kept, listing, flags=re.DOTALL)


class S3:
    """The server, as a test uses it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Empty, with a bucket. Also after it has died."""
        argv = [sys.executable, "-m", "tests.s3_server", str(self.port)]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout.readline(), self._log.read_text()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fault(self, do: str, **fields: Any) -> None:
        self._request("/-/faults", json.dumps({"do": do, **fields}).encode())

    def hits(self) -> list[int]:
        """How often each fault did its work."""
        found: list[int] = json.loads(self._request("/-/hits"))
        return found

    def _request(self, path: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=20) as answer:
            content: bytes = answer.read()
            return content

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def main(port: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # tests that are killed close nothing
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", port, Faults(DomainDispatcherApplication(create_backend_app)), threaded=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    credentials = {"aws_access_key_id": KEY, "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **credentials).create_bucket(Bucket=BUCKET)
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))

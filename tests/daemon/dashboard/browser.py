"""Debian's Chromium without a window, driven through chromedriver by plain HTTP (W3C WebDriver): what tests need of it.

Every request has a deadline; the end of a `Browser` ends both processes and everything they have started.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ANSWER_S = 30.0
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--force-device-scale-factor=1",
)  # fmt: skip
_SHADOW = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in the protocol


def missing() -> str:
    """What is not installed, "" if all is."""
    needed = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and '.join(needed)}: tests/install-servers system" if needed else ""


class Browser:
    def __init__(self, *, script: bool = True, width: int = 1200, height: int = 900) -> None:
        # Its sockets lie there, and a socket's path has 107 bytes: a test's own directory is too deep.
        self.root = root = Path(tempfile.mkdtemp(prefix="chromium-", dir="/tmp"))
        # Whatever Chromium wants to keep, it keeps here; and it asks nobody on the machine for anything.
        env = {**os.environ, "HOME": str(root), "XDG_RUNTIME_DIR": str(root), "TMPDIR": str(root)}
        env.pop("DBUS_SESSION_BUS_ADDRESS", None)
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0", f"--log-path={root / 'driver.log'}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
        self._session = ""
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            options: dict[str, Any] = {
                "args": [*ARGUMENTS, f"--user-data-dir={root / 'profile'}", f"--window-size={width},{height}"]
            }
            if not script:
                options["prefs"] = {"profile.managed_default_content_settings.javascript": 2}
            expected = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": expected}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(rb"successfully on port (\d+)", line):
                return int(found[1])
        raise AssertionError("chromedriver did not start")

    # --- what a person does -------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self._do("POST", "/url", {"url": url})

    def type(self, selector: str, text: str) -> None:
        self._do("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._do("POST", f"/element/{self._element(selector)}/click", {})

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    # --- what a person sees -------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return str(self._do("GET", "/url"))

    @property
    def title(self) -> str:
        return str(self._do("GET", "/title"))

    def text(self, selector: str = "body") -> str:
        return str(self._do("GET", f"/element/{self._element(selector)}/text"))

    def run(self, script: str, *arguments: object) -> Any:
        return self._do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def cookies(self) -> list[dict[str, Any]]:
        return list(self._do("GET", "/cookie"))

    def until(self, seen: Callable[[], T], what: str, within: float = 40.0) -> T:
        """What `seen` returns once it is true of the page."""
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(LookupError):
                if found := seen():
                    return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within:g} s: {what}; {self.url} has\n{self.text()[:3000]}")
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """What its console has said since it was asked last."""
        return [f"{one['level']} {one['message']}" for one in self._do("POST", "/se/log", {"type": "browser"})]

    def asked_for(self) -> list[tuple[str, str]]:
        """(type, address) of everything it has asked the network for since it was asked last."""
        found = []
        for one in self._do("POST", "/se/log", {"type": "performance"}):
            message = json.loads(one["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append((message["params"].get("type", ""), message["params"]["request"]["url"]))
        return found

    # --- how it looks -------------------------------------------------------------------------------------------------

    def prefers(self, scheme: str) -> None:
        """ "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def wide(self, width: int, height: int = 900) -> None:
        mobile = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def devtools(self, method: str, **params: object) -> Any:
        return self._do("POST", "/goog/cdp/execute", {"cmd": method, "params": params})

    # --- inside -------------------------------------------------------------------------------------------------------

    def _element(self, selector: str) -> str:
        return str(self._do("POST", "/element", {"using": "css selector", "value": selector})[_SHADOW])

    def _do(self, method: str, path: str, body: object = None) -> Any:
        return self._ask(method, self._session + path, body)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            with error:
                answer = json.load(error)["value"]
            raise LookupError(f"{answer['error']}: {answer['message'].splitlines()[0]}") from None

    def close(self) -> None:
        if self._session:
            with contextlib.suppress(OSError, LookupError):
                self._do("DELETE", "")
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._driver.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(5.0)
        if self._driver.stdout is not None:
            self._driver.stdout.close()
        shutil.rmtree(self.root, ignore_errors=True)

"""The page in a real browser, of a real job on two nodes that really loses a worker, a rank and an agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.dashboard.browser import Browser
from tests.daemon.dashboard.conftest import Browse
from tests.daemon.node import AgentNode, until

pytestmark = pytest.mark.system
TOKEN = "correct-horse-battery-staple-0a4b"
SCRIPT = str(Path(__file__).parent / "scripts" / "chats.py")


class Scene:
    """Two agents and a job of four workers on them, which trains."""

    def __init__(self, nodes: MakeNode, tmp_path: Path) -> None:
        secret = tmp_path / "token"
        secret.write_text(TOKEN + "\n")
        secret.chmod(0o600)
        self.ports = {name: free_port() for name in ("n1", "n2")}
        self.n1, self.n2 = (
            nodes(name, slots=2, http={"port": port, "token_file": str(secret)}) for name, port in self.ports.items()
        )
        shared = {"env": {"WORK": str(self.n1.work)}, "checkpoint_dir": str(self.n1.work / "ck")}
        # Long enough for a machine with much else to do to show it meanwhile.
        self.n1.job("gpt", SCRIPT, nodes="2", workers=2, stopped_after="8s", **shared)
        self.n1.start()
        self.n2.start()
        self.trains(1)

    def rank(self, node: AgentNode, local_rank: int) -> int:
        """Of one of its newest workers: who comes first to the store has rank 0."""
        return int(node.job_events("gpt", "group_started")[-1]["ranks"][local_rank])

    def trains(self, number: int) -> None:
        until(lambda: self.n1.job_events("gpt", "first_step", round=number), self.n1.diagnostics)

    def base(self, name: str = "n1") -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def entered(self, browser: Browser, name: str = "n1", path: str = "/jobs/gpt") -> None:
        """Log in as a person does."""
        browser.open(self.base(name) + path)
        assert browser.text("h1") == "Log in"
        browser.type("#token", TOKEN)
        browser.click(".login button")
        browser.until(lambda: browser.text("h1").startswith("gpt"), "the job")
        assert browser.url == self.base(name) + path


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as made:
        return int(made.getsockname()[1])


def ranks(browser: Browser, kind: str = "") -> int:
    return int(browser.run(f"return document.querySelectorAll('.rank{kind}').length"))


def drawn(browser: Browser) -> int:
    """How far left the drawing's rate begins: less, the more of the past it has."""
    return int(float(browser.run("return document.querySelector('.chart .rate').getAttribute('points').split(',')[0]")))


_STALLED = """
const bad = document.querySelector('.rank.bad .word'), said = (id) => document.getElementById(id).textContent;
return [bad.textContent, said('why').split(':')[0], said('state'), document.title.split(':')[0]];
"""


def test_live_page_shows_faults_and_survives_the_agent(nodes: MakeNode, browser: Browse, tmp_path: Path) -> None:
    scene, page = Scene(nodes, tmp_path), browser()
    scene.entered(page)
    page.complaints()  # of the 401 before
    page.run("window.mine = true; return 0")
    page.until(lambda: ranks(page, ".good") == 4, "four ranks that step")
    page.until(lambda: page.run("return document.querySelector('.live.on') !== null"), "that it is live")

    killed = scene.rank(scene.n1, 1)
    os.kill(scene.n1.workers("gpt")[1], signal.SIGKILL)
    page.until(lambda: f"rank {killed} was killed by SIGKILL" in page.text("#rounds"), "the crash")
    page.until(lambda: "steps again" in page.text("#rounds") or "step again" in page.text("#rounds"), "what it cost")

    scene.trains(2)
    stopped = scene.rank(scene.n2, 0)
    os.kill(scene.n2.workers("gpt")[0], signal.SIGSTOP)
    page.until(lambda: ranks(page, ".bad") == 1, "the rank that is stopped")
    assert page.run(_STALLED) == ["stopped", f"Rank {stopped} on n2 is stopped", "running, stalled", "▲ gpt"]
    page.until(lambda: "is stopped (state T)" in page.text("#rounds"), "the hang")
    page.until(lambda: f"rank {stopped} is at fault" in page.text("#blame"), "who was to blame")
    page.until(lambda: page.text("#state") == "running" and ranks(page, ".good") == 4, "that all is well again")
    assert not page.title.startswith("▲")
    page.until(lambda: "step" in page.text("#log"), "the log")
    assert "<script>document.title" in page.run("return document.querySelector('#log pre').textContent")
    assert page.complaints() == []

    before = drawn(page)
    scene.n1.kill()
    page.until(lambda: "does not answer" in page.text("#live"), "that the agent is away")
    assert ranks(page) == 4
    scene.n1.start()
    page.until(lambda: page.run("return document.querySelector('.live.on') !== null"), "that it is back")
    reached = page.text("#tiles")
    page.until(lambda: page.text("#tiles") != reached, "further steps")
    assert drawn(page) <= before + 5, "what lies before the agent's restart is not forgotten"

    assert page.run("return window.mine") is True, "it was loaded again"
    assert all("ERR_CONNECTION" in one or "ERR_EMPTY" in one for one in page.complaints())
    requested = {url for _, url in page.asked_for() if not url.startswith(("chrome:", "chrome-untrusted:", "data:"))}
    assert {url for url in requested if not url.startswith(scene.base() + "/")} == set()
    assert {f"{scene.base()}/page/style.css", f"{scene.base()}/page/live.js"} <= requested
    (cookie,) = page.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict") and TOKEN not in cookie["value"]

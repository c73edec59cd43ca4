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


def test_page_without_script_reloads_itself(nodes: MakeNode, browser: Browse, tmp_path: Path) -> None:
    """… of the agent that has no rank 0, too."""
    scene, page = Scene(nodes, tmp_path), browser(script=False)
    scene.entered(page, "n2")
    for part in ("Ranks", "n1", "n2", "first round: 4 workers on 2 nodes", "goes on from step"):
        page.until(lambda part=part: part in page.text(), part)  # type: ignore[misc]
    assert page.text("#live") != "" and "live on" not in page.run("return document.getElementById('live').className")
    killed = scene.rank(scene.n1, 1)
    os.kill(scene.n1.workers("gpt")[1], signal.SIGKILL)
    page.until(lambda: f"rank {killed} was killed by SIGKILL" in page.text(), "the crash")
    page.click("#which button")
    page.until(lambda: "rank=0" in page.url, "the form's page")
    page.click(".brand")
    page.until(lambda: page.text("h1") == "Jobs and nodes", "the overview")
    page.click("header button")
    page.until(lambda: page.text("h1") == "Log in", "that one is out")


_CONTRAST = """
const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => v / 255)
  .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
const found = [];
for (const e of document.body.querySelectorAll('*')) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.closest('title, desc, option')) continue;
  const box = e.getBoundingClientRect();
  if (!box.width || box.right < 0) continue;
  const style = getComputedStyle(e), ink = e.namespaceURI.endsWith('svg') ? style.fill : style.color;
  const block = e.classList.contains('in') ? getComputedStyle(e.parentElement.querySelector('rect')).fill : 'none';
  const ground = block === 'none' ? behind(e) : block;
  const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  const name = `${e.tagName}.${e.className.baseVal ?? e.className}`;
  if (ratio < 4.5) found.push(`${name} ${e.textContent.slice(0, 30)}: ${ratio}`);
}
return found;
"""


def test_page_is_accessible(nodes: MakeNode, browser: Browse, tmp_path: Path) -> None:
    """Contrast in both schemes, no sideways scrolling on a phone, the keyboard alone, names for what is used."""
    scene, page = Scene(nodes, tmp_path), browser()
    page.open(scene.base() + "/")
    for scheme in ("light", "dark"):
        page.prefers(scheme)
        assert page.run(_CONTRAST) == [], f"login, {scheme}"
    scene.entered(page)
    stopped = scene.rank(scene.n2, 0)
    os.kill(scene.n2.workers("gpt")[0], signal.SIGSTOP)
    page.until(lambda: ranks(page, ".bad") == 1, "the rank that is stopped")
    assert page.run(_CONTRAST) == [], "mid-fault"
    page.until(lambda: f"rank {stopped} is at fault" in page.text("#blame"), "who was to blame")
    for path in ("/jobs/gpt", "/", "/jobs/none"):
        page.open(scene.base() + path)
        for scheme in ("light", "dark"):
            page.prefers(scheme)
            assert page.run(_CONTRAST) == [], f"{path}, {scheme}"
        for width in (1200, 700, 360):
            page.wide(width)
            wide = page.run("return document.documentElement.scrollWidth")
            assert wide <= width, f"{path} is {wide} wide where there are {width}"
        page.wide(1200)
    page.open(scene.base() + "/jobs/gpt")
    assert page.run(_UNNAMED) == []
    page.press("\ue004")
    assert page.run("return document.activeElement.textContent") == "Skip to the content"
    page.press("\ue007", "\ue004")
    assert page.run("return document.activeElement.closest('main') !== null")


_UNNAMED = """
const used = 'a, button, input:not([type=hidden]):not([hidden]), select, [tabindex="0"], [role=img]';
return [...document.querySelectorAll(used)]
  .filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label')))
  .map((e) => e.outerHTML.slice(0, 80));
"""

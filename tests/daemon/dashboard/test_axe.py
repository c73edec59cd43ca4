"""axe-core's rules (WCAG 2.1 A and AA and its best practices) on every page, and the pages' weight."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from elasticd_daemon import keys as names
from elasticd_daemon.records import JobResult, RunnerStatus
from tests.daemon.dashboard.conftest import NOW, Browse, Serve
from tests.daemon.dashboard.samples import a_job, a_rank
from tests.daemon.served import TOKEN, Served

AXE = Path(__file__).parents[3] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core: tests/install-servers system fetches it with npm"),
]
MAX_PAGE_BYTES = 150_000
TAB, ENTER = "\ue004", "\ue007"
_PARTS = """performance.getEntriesByType("resource").filter((one) => one.initiatorType !== "fetch")
  .reduce((sum, one) => sum + one.decodedBodySize, 0)"""
_RUN = """(async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations.map((one) => `${one.impact} ${one.id}: ${one.nodes.map((n) => n.html.slice(0, 120))}`);
})()"""


def peopled(one: Served) -> None:
    """A job with a stopped rank, one that failed, and a queue of 250."""
    one.announce(RunnerStatus("llama", 1, (0, 1), "running", ""), gpus=("0", "1"))
    one.submit("llama")
    one.place("llama", 1, "n1")
    for n in range(2, 252):
        one.submit(f"sweep-{n}")
        one.place(f"sweep-{n}", n, reason="pending behind other jobs")
    one.submit("toy")
    failed = JobResult("toy", 252, "failed", 1, "rank 1 raised ValueError: no", NOW - 60, ("n1",))
    assert one.store.compare_and_swap(names.RESULTS + "toy", None, failed.to_json())
    one.log(1, 1, "stderr", "Traceback (most recent call last):\n  File x\nValueError: no\n", "toy", 252)
    one.event("round_published", NOW - 300, 1, world_size=2, nodes=["n1"], restarts=0, cause="start", reason="first")
    one.event("first_step", NOW - 290, 1, step=1)
    one.event("worker_exited", NOW - 200, 1, rank=1, step=101, exit_code=1)
    one.event("round_published", NOW - 199, 2, world_size=2, nodes=["n1"], restarts=1, cause="crash", reason="killed")
    one.event("first_step", NOW - 196, 2, step=91, recovery_seconds=4.0)
    for step in range(1, 280, 9):
        one.event("scalars", NOW - 196 + step / 2, 2, step=step, values={"loss": 3 - step / 100, "lr": 0.1})
    one.log(1, 0, "stdout", "step 1\n" * 2000)
    known = a_job()["progress"]
    ranks = [a_rank(0), a_rank(1, state="T", idle_seconds=30.0), a_rank(2), a_rank(3, phase="checkpoint")]
    status = {name: known[name] for name in ("round", "phase", "world_size", "step", "step_samples")}
    one.answers["status"] = {**status, "ranks": [{**rank, "node": "n1"} for rank in ranks]}


def evaluated(page: Any, script: str) -> Any:
    found = page.devtools("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in found, found
    return found["result"].get("value")


def test_pages_have_no_findings(serve: Serve, browser: Browse) -> None:
    one = serve()
    peopled(one)
    page = browser()
    base = "http://{}:{}".format(*one.address)
    checked: dict[str, list[str]] = {}

    def check(name: str) -> None:
        evaluated(page, AXE.read_text())
        for scheme, width in itertools.product(("light", "dark"), (360, 700, 1200)):
            page.prefers(scheme)
            page.wide(width)
            found = evaluated(page, _RUN)
            wide = page.run("return document.documentElement.scrollWidth")
            checked[f"{name}, {scheme}, {width}"] = found + ([f"{wide} wide"] if wide > width else [])

    page.open(base + "/")
    check("login")
    page.type("#token", TOKEN)
    page.click(".login button")
    page.until(lambda: page.text("h1") == "Jobs and nodes", "the overview")
    check("/")
    for path in ("/?state=failed", "/jobs/llama", "/jobs/toy", "/jobs/sweep-7", "/jobs/none", "/jobs/llama/explain"):
        page.open(base + path)
        check(path)
        weight = evaluated(page, "new TextEncoder().encode(document.documentElement.outerHTML).length")
        assert weight + evaluated(page, _PARTS) <= MAX_PAGE_BYTES, path
    page.open(base + "/jobs/llama")
    page.press(TAB)
    assert page.run("return document.activeElement.textContent") == "Skip to the content"
    page.press(ENTER, TAB)
    assert page.run("return document.activeElement.closest('main') !== null")
    assert {name: found for name, found in checked.items() if found} == {}


def test_forms_work_without_a_script(serve: Serve, browser: Browse) -> None:
    one = serve()
    peopled(one)
    page = browser(script=False)
    base = "http://{}:{}".format(*one.address)
    page.open(base + "/")
    page.type("#token", TOKEN)
    page.click(".login button")
    page.click("#which option[value=failed]")
    page.click("#which button")
    page.until(lambda: "toy" in page.text("#jobs") and "sweep-21" not in page.text("#jobs"), "the failed job")
    page.click("button[formaction='/nodes/n1/cordon']")
    page.until(lambda: "cordoned" in page.text("#nodes"), "the cordon")
    page.open(base + "/jobs/sweep-7")
    page.click(".acts summary")
    page.click("form[action='/jobs/sweep-7/cancel'] button")
    page.until(lambda: "cancelled by the token's holder, in a browser" in page.text(), "the end")

"""What became of a job's time, as Prometheus sees it, against the job's event log."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticd_agent.hangs.explain.event_log import RunLog
from elasticd_agent.model.log_events import decode
from elasticd_agent.telemetry.metric_table import TIME_STATES
from elasticd_agent.telemetry.timeline import JobTimeline
from elasticd_daemon.api.local import summarize
from elasticd_daemon.api.node_files import merge_progress
from tests.etcd import free_ports
from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, until
from tests.faults.nodes import Nodes

StartNodes = Callable[[str], Nodes]
LATE_S = 0.5
"""A step may have been made for so long when the agent looks: what is scraped before that cannot know of it."""


@dataclass(slots=True)
class Scraped:
    """One agent's metrics, scraped again and again; what must hold of every scrape is checked at each."""

    port: int
    pages: list[dict[str, float]] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)

    def page(self) -> dict[str, float]:
        """`name{labels but job_id and node}` to value; empty while nobody listens."""
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except urllib.error.URLError:
            return {}
        found = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                labels = {name: value for name, value in one.labels.items() if name not in ("job_id", "node")}
                found[one.name + str(sorted(labels.items()) if labels else "")] = one.value
                assert one.labels["node"], one
        self.pages.append(found)
        self.asked.append((began, time.monotonic()))
        return found

    def of(self, name: str, **labels: str) -> float | None:
        return self.page().get(key(name, **labels))

    def times(self) -> dict[str, float]:
        found = self.page()
        return {state: found[key("elasticd_time_seconds_total", state=state)] for state in TIME_STATES}

    def assert_no_time_was_made_or_lost(self) -> None:
        """From any scrape to the next one the three grow, by what has passed between the two and no more."""
        told = [[page[key("elasticd_time_seconds_total", state=state)] for state in TIME_STATES] for page in self.pages]
        for n in range(1, len(told)):
            assert all(after >= before for before, after in zip(told[n - 1], told[n], strict=True))
            grew = sum(told[n]) - sum(told[n - 1])
            least, most = self.asked[n][0] - self.asked[n - 1][1], self.asked[n][1] - self.asked[n - 1][0]
            assert least - 1e-3 <= grew <= most + 1e-3


def key(name: str, **labels: str) -> str:
    return name + (str(sorted(labels.items())) if labels else "")


def timeline_of(agent: Job) -> JobTimeline:
    timeline = JobTimeline()
    for line in filter(None, map(decode, agent.events())):
        timeline.feed(line)
    return timeline


@pytest.mark.system
def test_cost_of_a_kill_in_the_event_log(job: StartJob, tmp_path: Path) -> None:
    """What a kill costs is what the event log says."""
    scraped = Scraped(*free_ports(1))
    flags = ["--metrics-port", str(scraped.port), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    trains = job(
        "resume.py", "--steps", "100000", "--every", "40", flags=flags, faults=[Fault(1, 75, "SIGKILL", round=1)]
    )
    first_page = until(scraped.page, trains.report)
    idle_s = first_page[key("elasticd_time_seconds_total", state="idle")]
    assert idle_s == sum(first_page[key("elasticd_time_seconds_total", state=state)] for state in TIME_STATES) > 0
    caught_up = until(lambda: scraped.page() and trains.events("work_recovered"), trains.report)[0]
    # What a counter cannot take back is made good within as much time again; then they stand where the log says.
    until(lambda: abs(scraped.times()["lost"] - caught_up["seconds"]) < LATE_S, trains.report)
    scraped.assert_no_time_was_made_or_lost()
    times, (asked, answered), found = scraped.times(), scraped.asked[-1], scraped.pages[-1]

    (first, again), died = trains.events("first_step"), trains.event("worker_exited", signal=int(signal.SIGKILL))
    assert trains.event("resumed")["step"] == 40 < caught_up["step"], "steps were trained again"
    assert caught_up["mono"] > again["mono"]
    # What is lost begins with the last step before the fault, which came after the one before it was written down.
    lost_from = caught_up["mono"] - caught_up["seconds"]
    written = [line.split() for rank in (0, 1) for line in (trains.work / f"steps-{rank}").read_text().splitlines()]
    before = [(int(step), float(at)) for number, step, _, at in written if number == "1"]
    assert max(before)[0] == 74
    # Rank 0 may have finished it a moment after rank 1, which was dead by then.
    assert max(at for step, at in before if step == 73) < lost_from < died["mono"] + LATE_S
    useful_s = times["useful"] - (lost_from - first["mono"])
    assert asked - LATE_S < caught_up["mono"] + useful_s < answered + LATE_S
    assert times["lost"] > found["elasticd_recovery_seconds_sum"] > 0, "to train again is no part of the recovery"

    # What `elasticd status` reads out of the log is the same.
    progress = timeline_of(trains)
    now = time.time() - (time.monotonic() - answered)
    goodput = progress.goodput(now)
    assert goodput is not None and progress.began_at is not None
    assert -LATE_S <= goodput * (now - progress.began_at) - times["useful"] < answered - asked + LATE_S

    assert found[key("elasticd_faults_total", cause="crash", culprit=trains.event("round_published")["node"])] == 1
    assert found["elasticd_round"] == 2
    assert "elasticd_checkpoint_interval_seconds" not in found, "it is so many steps"
    (info,) = (name for name in found if name.startswith("elasticd_round_info"))
    assert trains.events("round_published")[1]["reason"] in info
    assert found[key("elasticd_job_phase", phase="running")] == 1
    trains.process.terminate()
    trains.wait()


@pytest.mark.system
def test_the_loss_of_a_node_as_every_node_tells_it(nodes: StartNodes, tmp_path: Path) -> None:
    both = nodes("1:2")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]

    def start(name: str) -> tuple[Job, Scraped]:
        scraped = Scraped(*free_ports(1))
        asked = [*flags, "--metrics-port", str(scraped.port)]
        script = "resume.py", "--steps", "100000", "--every", "500ms"
        agent = both.agent(name, *script, flags=asked, workers="2", warm=True)
        return agent, scraped

    a, on_a = start("a")
    a.event("first_step")
    b, on_b = start("b")
    b.event("first_step")
    joined = max(event["round"] for event in a.events("round_published"))
    until(lambda: on_a.of("elasticd_world_size") == 4 and on_b.of("elasticd_world_size") == 4, "both")
    (there, here) = on_b.page(), on_a.page()
    assert any("elasticd_round_info" in name for name in here), "a plans"
    assert not any("elasticd_round_info" in name for name in there)
    until(lambda: (on_b.of("elasticd_lease_renewal_seconds_count") or 0) > 1, "renewals")
    assert on_b.of("elasticd_lease_seconds") == 3
    assert on_b.of("elasticd_checkpoint_interval_seconds") == 0.5
    assert here[key("elasticd_time_seconds_total", state="lost")] == 0, f"to take a node is no fault\n{a.report()}"

    b.process.kill()
    until(lambda: [event for event in a.events("first_step") if event["round"] > joined], a.report)
    until(lambda: on_a.of("elasticd_world_size") == 2, a.report)
    lost = until(lambda: on_a.times()["lost"], a.report)
    found = on_a.page()
    assert 0 < lost < 60
    assert found[key("elasticd_faults_total", cause="node_lost", culprit="b")] == 1, a.report()
    # Where the others are slow to hear why they have lost a peer, that is told first, and costs a round of its own.
    blamed = {name for name, value in found.items() if name.startswith("elasticd_faults_total") and value}
    ours = [key("elasticd_faults_total", cause=cause, culprit=of) for cause, of in (("node_lost", "b"), ("crash", ""))]
    assert blamed <= set(ours), a.report()
    assert found["elasticd_recovery_seconds_count"] >= 1
    assert {name for name in found if name.startswith("elasticd_worker_step")} <= {
        key("elasticd_worker_step", rank=str(rank)) for rank in (0, 1)
    }
    on_a.assert_no_time_was_made_or_lost()
    a.process.terminate()
    a.wait()


LONG_STEPS = f"""
import os, pathlib, time, torch
optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).parameters())
while not pathlib.Path(os.environ["WORK"], "enough").exists():
    optimizer.step()
    time.sleep({4 * LATE_S})
"""


@pytest.mark.system
def test_one_figure_for_the_recovery_of_two_nodes(nodes: StartNodes, tmp_path: Path) -> None:
    """The leader's, from when the other node's worker ended; its own worker's last step is long ago."""
    both = nodes("2")
    (tmp_path / "long.py").write_text(LONG_STEPS)
    scrapes = [Scraped(*free_ports(1)) for _ in "ab"]
    a, b = agents = [
        both.agent(name, str(tmp_path / "long.py"), flags=["--metrics-port", str(scraped.port)], warm=True)
        for name, scraped in zip("ab", scrapes, strict=True)
    ]
    first = a.event("round_published", round=1)
    leads, other = (a, b) if first["leader"] == "a" else (b, a)
    victim = 1 - first["nodes"].index(first["leader"])
    for agent in agents:
        agent.event("first_step", round=1)
    time.sleep(2 * LATE_S)
    died = other.kill(victim, round=1)
    measured, unmeasured = (agent.event("first_step", round=2) for agent in (leads, other))
    seconds = measured["recovery_seconds"]
    assert unmeasured["recovery_seconds"] is None
    assert abs(seconds - (measured["mono"] - died["mono"])) < LATE_S / 2
    until(lambda: sum(scraped.of("elasticd_recovery_seconds_count") or 0 for scraped in scrapes), leads.report)
    assert sum(scraped.page()["elasticd_recovery_seconds_count"] for scraped in scrapes) == 1
    assert sum(scraped.page()["elasticd_recovery_seconds_sum"] for scraped in scrapes) == seconds
    said = [line for agent in agents for line in agent.err.splitlines() if "after the fault" in line]
    assert len(said) == 1 and f"training again {seconds:.2f} s after the fault" in said[0], said

    logs = {agent: timeline_of(agent) for agent in agents}
    for order in (agents, agents[::-1]):  # the node that is asked comes first
        page = merge_progress([summarize(logs[agent], "ab"[agents.index(agent)], time.time()) for agent in order], {})
        assert page is not None and page.rounds[-1].lost_seconds == round(seconds, 3)
    lines = [line for agent in (other, leads) for line in agent.events()]
    assert RunLog.run_with_round(lines, 1, 0.0).aftermath().recovery_s == seconds
    assert both.enough() == [0, 0]

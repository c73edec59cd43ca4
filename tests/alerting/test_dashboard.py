"""Every query of the dashboards in deploy/grafana, asked of a real Prometheus that has watched a job with faults."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.alerting.conftest import Watched
from tests.alerting.pair import JOB
from tests.alerting.watching import Watch
from tests.daemon.node import until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"


def shown(query: str, variables: Mapping[str, str]) -> str:
    """As Grafana would send it."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], query)


def values(watch: Watch, query: str, since: float) -> list[str]:
    """What a variable of Grafana's offers: label_values(series, label)."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert found, query
    now = f"{time.time():.3f}"
    return list(watch.api(f"label/{found[2]}/values", **{"match[]": found[1], "start": f"{since:.3f}", "end": now}))


def asked_of(watch: Watch, board: Any, start: float, job: str = JOB) -> dict[str, list[Any]]:
    """What each query returns over the time since then, by where it stands in the dashboard."""
    end = time.time()
    variables = {"job_id": job, "node": ".*", "__range": f"{end - start:.0f}s", "__rate_interval": "10s"}
    found: dict[str, list[Any]] = {}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            query = shown(target["expr"], variables)
            result = watch.query(query, end) if target["instant"] else watch.range(query, start, end)
            found[f"{panel['title']} {target['refId']}"] = result
    for annotation in board["annotations"]["list"]:
        if "builtIn" not in annotation:
            found[f"annotation {annotation['name']}"] = watch.range(shown(annotation["expr"], variables), start, end)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = values(watch, variable["query"]["query"], start)
    return found


def numbers(one: Any) -> list[float]:
    if isinstance(one, str):
        return [1.0]
    return [float(value) for _, value in one.get("values", [one["value"]] if "value" in one else [])]


@pytest.mark.timeout(400)
def test_every_query_returns_data_on_a_job_with_faults(watched: Watched) -> None:
    board, fleet = (json.loads((FOLDER / name).read_text()) for name in ("elasticd.json", "elasticd-fleet.json"))
    start = time.time()
    nodes, watch = watched(scale=10)
    # A slow rank, for the minute that it takes to be sure of it.
    (nodes.work / "lag-1").write_text("0.1")
    until(lambda: watch.query("elasticd_straggler_ratio"), watch.told, 150)
    (nodes.work / "lag-1").unlink()
    # A crash, a hang, a check that finds something.
    for node, signum, cause in (("n1", signal.SIGKILL, "crash"), ("n2", signal.SIGSTOP, "hung")):
        before = nodes.round()
        os.kill(nodes.worker(node), signum)
        until(lambda cause=cause: watch.query(f'elasticd_restarts_total{{cause="{cause}"}} > 0'), nodes.told)  # type: ignore[misc]
        nodes.on_both(after=before)
        until(lambda: watch.query(f'elasticd_round_info{{round="{nodes.round()}"}}'), watch.told)
    nodes.etcd.stop()
    until(lambda: watch.query("elasticd_node_store_up == 0"), watch.told)
    nodes.etcd.cont()
    until(lambda: len(watch.query("elasticd_node_store_up == 1")) == 2, watch.told)
    nodes.fall_ill("n2")
    until(lambda: watch.query("elasticd_health_check_failing == 1"), watch.told)
    until(lambda: watch.query('ALERTS{alertstate="firing"}'), watch.told)
    found = asked_of(watch, board, start)
    empty = [where for where, result in found.items() if not any(map(numbers, result))]
    nothing = [
        where for where, result in found.items() if all(number != number for one in result for number in numbers(one))
    ]
    assert not empty and not nothing, f"no data: {empty}; only NaN: {nothing}\n{watch.told()}"
    of_all = asked_of(watch, fleet, start, ".*")
    empty = [where for where, result in of_all.items() if not any(map(numbers, result))]
    assert not empty, f"no data in the fleet's: {empty}"
    rounds = {int(one["metric"]["round"]): one for one in found["annotation Rounds"]}
    assert len(rounds) >= 3 and all(one["metric"]["reason"] for one in rounds.values())
    assert all(abs(numbers(one)[0] / 1000 - time.time()) < 600 for one in rounds.values()), "times in milliseconds"
    assert sorted(found["variable node"]) == ["n1", "n2"] and found["variable job_id"] == [JOB]
    (goodput,) = (numbers(one)[0] for one in found["Goodput A"])
    assert 0 < goodput < 1

"""The Grafana dashboards as files: the requirements of Grafana 9 and newer; queries parse and name series that exist.

What its queries return on a job with faults is tests/alerting's to see. What is wanted is from Grafana's own schema of
dashboards (kinds/dashboard/dashboard_kind.cue in its repository).
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.telemetry.metric_table import METRICS
from elasticd_daemon import metrics as gauges
from tests.deploy.prometheus.test_rules import promtool

ROOT = Path(__file__).resolve().parents[2]
JOB, FLEET = (ROOT / "deploy" / "grafana" / name for name in ("elasticd.json", "elasticd-fleet.json"))
PANELS = {"stat", "timeseries", "table", "bargauge", "state-timeline", "row"}
"""Those of Grafana's own that are used here; all are in 9.0."""
BUILT_IN = {"__range", "__rate_interval", "__interval"}
HISTOGRAM = ("_bucket", "_sum", "_count")
WORDS = {
    "sum", "min", "max", "count", "by", "on", "or", "time", "vector", "group_left", "increase", "rate",
    "last_over_time", "histogram_quantile", "offset", "le",
}  # fmt: skip


def exists() -> dict[str, set[str]]:
    """Name of every series there is → its labels."""
    specs = [(spec, {"job_id", "node"}) for spec in METRICS]
    specs += [(spec, {"node"}) for spec in gauges.METRICS]
    found = {"ALERTS": {"alertname", "alertstate"}}
    for spec, own in specs:
        for name in [spec.name + end for end in HISTOGRAM] if spec.kind == "histogram" else [spec.name]:
            found[name] = own | set(spec.labels) | ({"le"} if name.endswith("_bucket") else set())
    return found


@pytest.fixture(scope="module", params=[JOB, FLEET], ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> Any:
    return json.loads(request.param.read_text())


def queries(board: Any) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (one["expr"] for one in board["annotations"]["list"] if "builtIn" not in one)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_dashboard_is_valid(board: Any) -> None:
    wanted = {
        "title": str, "uid": str, "description": str, "tags": list, "editable": bool, "graphTooltip": int,
        "panels": list, "schemaVersion": int, "version": int, "time": dict, "timepicker": dict, "templating": dict,
        "annotations": dict, "timezone": str, "refresh": str, "links": list,
    }  # fmt: skip
    assert {key: type(board[key]) for key in wanted} == wanted
    assert 8 <= len(board["uid"]) <= 40 and board["graphTooltip"] in (0, 1, 2)
    assert board["schemaVersion"] == 36  # of 9.0; newer ones bring it up to theirs
    assert "id" not in board, "an id is of one installation"
    assert not {"__inputs", "__requires"} & board.keys(), "provisioned from a file nobody is asked for inputs"


def test_panel_order(board: Any) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = []
    for panel in panels:
        assert panel["type"] in PANELS and panel["title"], panel["id"]
        at = panel["gridPos"]
        assert at.keys() == {"x", "y", "w", "h"} and at["h"] > 0 and 0 < at["w"] <= 24 - at["x"], panel["title"]
        cells += itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        if panel["type"] == "row":
            assert (panel["panels"], panel["collapsed"], at["w"]) == ([], False, 24)
            continue
        assert panel["description"] and isinstance(panel["options"], dict)
        references = [target["refId"] for target in panel["targets"]]
        assert references == list("ABCDEF")[: len(references)], panel["title"]
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        for steps in thresholds(panel["fieldConfig"]):
            values = [step["value"] for step in steps]
            assert values[0] is None and values[1:] == sorted(values[1:]), panel["title"]
        for override in panel["fieldConfig"]["overrides"]:
            assert override.keys() == {"matcher", "properties"}
            named = {target.get("legendFormat", "") for target in panel["targets"]}
            for step in panel.get("transformations", []):
                named |= {*step["options"].get("renameByName", {}).values()}
            assert override["matcher"]["options"] in named or "{{state}}" in named, override
    assert len(cells) == len(set(cells)), "two panels overlap"


def thresholds(config: Any) -> Iterator[Any]:
    if "thresholds" in config["defaults"]:
        assert config["defaults"]["thresholds"]["mode"] == "absolute"
        yield config["defaults"]["thresholds"]["steps"]


def test_panels_use_the_selected_data_source(board: Any) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == chosen, panel["title"]
            assert all(target["datasource"] == chosen for target in panel["targets"]), panel["title"]
    grafanas, *own = board["annotations"]["list"]
    assert (grafanas["builtIn"], grafanas["datasource"]["uid"]) == (1, "-- Grafana --")
    for annotation in own:
        assert annotation["datasource"] == chosen and annotation["enable"] and annotation["iconColor"]
        assert annotation["titleFormat"] and annotation["textFormat"]


def test_promtool_parses_every_query(board: Any, tmp_path: Path) -> None:
    """As recording rules: an expression on its own needs a server."""
    values = {"job_id": "lm|.*", "node": ".*", **dict.fromkeys(BUILT_IN, "10s")}
    rules = []
    for query in queries(board):
        series = re.fullmatch(r"label_values\((.+), \w+\)", query)
        asked = re.sub(r"\$\{?(\w+)(:\w+)?\}?", lambda found: values[found[1]], series[1] if series else query)
        rules.append({"record": f"query:{len(rules)}", "expr": asked})
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": board["uid"], "rules": rules}]}))
    done = subprocess.run([promtool(), "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr


def test_variables_are_defined_and_used(board: Any) -> None:
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert {name: one["type"] for name, one in variables.items()} == {
        "datasource": "datasource", "job_id": "query", "node": "query",
    }  # fmt: skip
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("job_id", "node"):
        assert variables[name]["refresh"] == 2, "jobs and nodes come and go: asked again whenever the time changes"
        assert variables[name]["definition"] == variables[name]["query"]["query"]
    asked = {name for query in queries(board) for name in re.findall(r"\$\{?(\w+)", query)}
    assert asked - BUILT_IN == {"job_id", "node"}


def test_queries_use_existing_series_and_labels(board: Any) -> None:
    there = exists()
    asked = set()
    for query in queries(board):
        # Take out what is no name of a series: texts, what is in [] and what `by` and `on` list.
        bare = re.sub(r'"[^"]*"|\$\w+|\[[^]]*\]|\{[^}]*\}|\b(by|on|label_values) \([^)]*\)|, \w+\)$', " ", query)
        names = set(re.findall(r"[a-zA-Z_:]\w*", bare)) - WORDS
        if query.startswith("label_values("):
            names = {re.split(r"[({,]", query)[1]}
        assert names and names <= there.keys(), f"{query}: {names - there.keys()}"
        asked |= names
        labels = {label for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in listed.split(", ")}
        labels |= {
            label for braces in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)(?==|!)", braces)
        }
        known = set().union(*(there[name] for name in names))
        assert labels <= known, f"{query}: {labels - known}"
    assert len(asked) > (30 if board["uid"] == "elasticd" else 10)


def test_legends_use_labels_of_the_query(board: Any) -> None:
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            named = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            left = {label for listed in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in listed.split(", ")}
            assert named <= left, f"{panel['title']}: {named - left}"


def test_panels_lead_to_the_runbook(board: Any) -> None:
    anchors = {
        f"#{name.lower()}" for name in re.findall(r"^## (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)
    }
    named = re.findall(r"Runbook: elasticd docs operations(#\w+)", json.dumps(board))
    assert len(named) >= 5
    assert set(named) <= anchors


def test_fleet_selects_many_jobs_and_leads_to_each() -> None:
    fleet = json.loads(FLEET.read_text())
    jobs = next(one for one in fleet["templating"]["list"] if one["name"] == "job_id")
    assert (jobs["multi"], jobs["includeAll"], jobs["allValue"]) == (True, True, ".*")
    assert "=~" in "".join(queries(fleet)) and 'job_id="' not in "".join(queries(fleet))
    assert '"/d/elasticd?var-job_id=${__value.raw}"' in FLEET.read_text()

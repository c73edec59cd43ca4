"""The alerts and recording rules: promtool's checks and its unit tests in rules/, and that all they name exists.

rules/*.yaml are promtool's own format: `promtool test rules tests/deploy/prometheus/rules/*.yaml`. What a rule or a
test names must be in the code's tables, or a rule would be right about a metric that nobody serves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticd_agent.telemetry.metric_table import METRICS, RESTART_CAUSES, TIME_STATES
from elasticd_daemon import metrics as gauges

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy" / "prometheus"
FILES = [DEPLOY / "recording.yaml", DEPLOY / "alerts.yaml"]
UNIT_TESTS = sorted((Path(__file__).parent / "rules").glob("*.yaml"))
PAGE = ROOT / "docs" / "operations.md"

ASKED_FOR = {
    "ElasticdJobHung", "ElasticdJobCrashLooping", "ElasticdRestartBudgetLow", "ElasticdNoProgress",
    "ElasticdCheckpointStale", "ElasticdCheckpointFailing", "ElasticdCheckpointWriterSlow",
    "ElasticdWorldSizeBelowTarget", "ElasticdNodeQuarantined",
    "ElasticdAgentDown", "ElasticdStoreUnreachable", "ElasticdSlowRank", "ElasticdGoodputLow",
    "ElasticdLeaseRenewalsSlow",
}  # fmt: skip
SCRAPE = {"job", "instance"}
"""What Prometheus itself gives every series."""
VALUES = {
    "cause": set(RESTART_CAUSES),
    "state": {*TIME_STATES, *gauges.NODE_STATES},
    "outcome": set(gauges.RUNNER_OUTCOMES),
}
"""Values that rules select by."""


def rules() -> list[dict[str, Any]]:
    return [rule for file in FILES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def series() -> dict[str, set[str]]:
    """Name of every series there can be → its labels."""
    own = [(spec, {"job_id", "node"}) for spec in METRICS]
    own += [(spec, {"node"}) for spec in gauges.METRICS]
    found: dict[str, set[str]] = {"up": set()}
    for spec, labels in own:
        ends = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        for end in ends:
            found[spec.name + end] = labels | set(spec.labels) | ({"le"} if end == "_bucket" else set())
    return found


def recorded() -> dict[str, set[str]]:
    """Name of every recorded series → the labels it is made by."""
    made = {}
    for rule in rules():
        if "record" in rule:
            inner = re.findall(r"by \(([^)]*)\)", rule["expr"])
            made[rule["record"]] = {label.strip() for each in inner for label in each.split(",")} or {"job_id"}
    return made


def texts(rule: dict[str, Any]) -> Iterator[str]:
    """Its expression, and those in the templates of its annotations."""
    yield rule["expr"]
    for text in rule.get("annotations", {}).values():
        yield from (
            re.sub(r"%q", '"x"', found).replace('\\"', '"') for found in re.findall(r'"((?:[^"\\]|\\.)*)"', text)
        )


def metrics_in(text: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', '""', text)
    return set(re.findall(r"(?<![\w:])(?:elasticd[a-z0-9_:]+|up)(?![\w:])", bare))


def selected_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(metric, label, the values it is compared with) of every selector."""
    for name, inner in re.findall(r"([a-z_:0-9]+)\{([^}]*)\}", text):
        for label, values in re.findall(r'(\w+)\s*[!=~]+\s*"([^"]*)"', inner):
            yield name, label, values.split("|")


def promtool() -> str:
    """tests/install-servers puts Debian's into .venv; where it cannot, what is checked in Python below has to do."""
    found = shutil.which("promtool") or shutil.which("promtool", path=ROOT / ".venv" / "prometheus" / "usr" / "bin")
    if found is None:
        pytest.skip("no promtool, and tests/install-servers could not fetch it")
    return found


def ran(*command: str | Path) -> str:
    """ "" if it succeeded, else all it said."""
    environment = os.environ | {"GOGC": "400"}  # a quarter less of CPU for some memory
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, env=environment
    )
    return done.stdout if done.returncode else ""


def test_promtool_has_nothing_to_say_of_the_rules_and_the_configuration(tmp_path: Path) -> None:
    tool = promtool()
    assert not ran(tool, "check", "rules", "--lint-fatal", *FILES)
    # The rules are where the configuration looks for them once they are installed; here they are not.
    (tmp_path / "agents.json").write_text((DEPLOY / "agents.json").read_text())
    config = (DEPLOY / "prometheus.yaml").read_text().replace("/etc/prometheus/elasticd/", f"{tmp_path}/")
    (tmp_path / "runs.json").write_text("[]")
    for file in FILES:
        shutil.copy(file, tmp_path)
    (tmp_path / "prometheus.yml").write_text(config)
    assert not ran(tool, "check", "config", tmp_path / "prometheus.yml")


@pytest.mark.system
@pytest.mark.timeout(300)  # 6 s on two idle cores, two minutes where thirty others want them
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    tool = promtool()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [one for one in pool.map(lambda file: ran(tool, "test", "rules", file), UNIT_TESTS) if one]
    assert not said, "\n".join(said)


def test_the_unit_tests_fix_the_order_of_the_groups() -> None:
    """Without it promtool's order is that of a Go map: an alert sees this turn's recorded value, or the one before."""
    groups = [group["name"] for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
    for file in UNIT_TESTS:
        assert yaml.safe_load(file.read_text()).get("group_eval_order") == groups, file.name


def test_every_alert_has_a_firing_and_a_quiet_unit_test() -> None:
    """The firing one compares the texts."""
    fires, silent = set(), set()
    for file in UNIT_TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                for alert in case["exp_alerts"]:
                    assert alert["exp_annotations"], f"{file.name}: {test['name']}"
                    fires.add((case["alertname"], alert["exp_labels"]["severity"]))
            for case in test.get("promql_expr_test", []):
                if not case["exp_samples"] and case["expr"].startswith("count_over_time(ALERTS{"):
                    silent.update(re.findall(r'alertname="(\w+)"', case["expr"]))
    there = {(alert["alert"], alert["labels"]["severity"]) for alert in alerts()}
    assert there - fires == set()
    assert {name for name, _ in there} - silent == set(), "over a whole time, in which a counter is reset or a job ends"


def test_all_that_were_asked_for_are_there_and_say_what_a_person_needs() -> None:
    assert {alert["alert"] for alert in alerts()} >= ASKED_FOR
    for alert in alerts():
        assert set(alert["labels"]) == {"severity"} and alert["labels"]["severity"] in ("page", "ticket"), alert[
            "alert"
        ]
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}, alert["alert"]
        command, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert (command, anchor) == ("elasticd docs operations", alert["alert"].lower())


def test_every_runbook_exists() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {alert["alert"].lower() for alert in alerts()} - anchors == set()


@pytest.mark.parametrize(
    "rule", rules(), ids=lambda rule: rule.get("record") or f"{rule['alert']}-{rule['labels']['severity']}"
)
def test_every_metric_and_label_a_rule_names_exists(rule: dict[str, Any]) -> None:
    known = series() | recorded()
    labels = set(SCRAPE)
    for text in texts(rule):
        named = metrics_in(text)
        assert named - known.keys() == set(), "no such metric"
        labels = labels.union(*(known[name] for name in named))
        for name, label, values in selected_in(text):
            assert label in known.get(name, set()) | SCRAPE, f"{name} has no label {label}"
            if label in VALUES:
                assert set(values) <= VALUES[label], f"{label} is never {values}"
    labels |= set(re.findall(r'"(\w+)", "\$1", "(?:\w+)"', rule["expr"]))  # label_replace
    listed = re.findall(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)", " ".join(texts(rule)))
    used = {label.strip() for each in listed for label in each.split(",") if label.strip()}
    for text in rule.get("annotations", {}).values():
        used |= set(re.findall(r"(?:\$labels|\.Labels)\.(\w+)", text)) | set(
            re.findall(r'(?:label|sortByLabel) "(\w+)"', text)
        )
    assert used - labels == set(), "no such label"


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_unit_tests_are_about_series_as_they_are_served(file: Path) -> None:
    known = series()
    for test in yaml.safe_load(file.read_text())["tests"]:
        for given in test["input_series"]:
            name, _, inner = given["series"].partition("{")
            own = set(re.findall(r"(\w+)=", inner)) - SCRAPE
            assert name in known and own <= known[name], given["series"]
            assert name == "up" or known[name] - own <= {"le"}, f"{given['series']} lacks {known[name] - own}"


def test_what_alertmanager_leaves_out_is_an_alert() -> None:
    config = yaml.safe_load((DEPLOY / "alertmanager.yaml").read_text())
    names = {alert["alert"] for alert in alerts()}
    for rule in config["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            label, values = re.fullmatch(r'(\w+)=~?"([^"]+)"', matcher).groups()  # type: ignore[union-attr]
            if label == "alertname":
                assert values == "Elasticd.+" or set(values.split("|")) <= names, matcher
            else:
                assert (label, values) in {("severity", "page"), ("severity", "ticket")}, matcher

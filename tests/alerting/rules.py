"""The rule files of deploy/prometheus as they are, or with all of their times divided by one figure.

What takes a quarter of an hour in production takes a minute in a test that divides by 15: what fires after how long,
and what resolves, stays in proportion. A time is `for`, whatever is in [], and a number of 60 or more in an expression:
there that always is seconds (fewer are factors). No range becomes shorter than four scrapes; nothing else is touched.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
RULES = REPOSITORY / "deploy" / "prometheus"
_MIN_RANGE_MS = 4_000
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RANGE = re.compile(r"\[([^]]*)\]")
_SECONDS = re.compile(r"(?<![\w.\[])([6-9]\d|\d{3,})(?![\w.])")


def scaled(folder: Path, by: float = 1.0) -> list[Path]:
    """Rule files to give to a Prometheus that scrapes once a second; copies in `folder` if their times are divided."""
    files = [RULES / "recording.yaml", RULES / "alerts.yaml"]
    if by == 1:
        return files
    made = []
    for file in files:
        told = yaml.safe_load(file.read_text())
        for group in told["groups"]:
            for rule in group["rules"]:
                _scale(rule, by)
        (folder / file.name).write_text(json.dumps(told, indent=1))
        made.append(folder / file.name)
    return made


def _scale(rule: dict[str, Any], by: float) -> None:
    for key in rule.keys() & {"for", "keep_firing_for"}:
        rule[key] = _shorter(rule[key], by, 0)
    expression = _RANGE.sub(lambda found: f"[{_shorter(found[1], by, _MIN_RANGE_MS)}]", rule["expr"])
    rule["expr"] = _SECONDS.sub(lambda found: f"{int(found[1]) / by:g}", expression)


def _shorter(text: str, by: float, least_ms: int) -> str:
    def one(found: re.Match[str]) -> str:
        given = int(found[1]) * _MS[found[2]]
        return f"{max(min(given, least_ms), round(given / by))}ms"

    return re.sub(r"(\d+)(ms|[smhd])\b", one, text)

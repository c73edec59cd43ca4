"""docs/operations.md and the alerts' words: every `elasticd …` in them is a command that the real parser takes.

At three in the morning somebody types these. What they show was typed once; this is what keeps them typeable.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from docs.generate.metrics import max_series
from elasticd_agent.cli.main import AGENT_COMMANDS
from elasticd_daemon.cli import doctor
from elasticd_daemon.cli import job_commands as verbs
from elasticd_daemon.cli.config_command import config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"


NAMES = [["explain"], ["dump"], ["run"]]


def lines() -> list[str]:
    """Of blocks, sentences, and what alerts say."""
    blocks = [
        text for kind, text in re.findall(r"^ *```(\w*)\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE) if kind != "yaml"
    ]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", PAGE, flags=re.DOTALL | re.MULTILINE))
    said = []
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            # `: elasticd jobs` at the end of a description is the command to type.
            said += re.findall(r": (elasticd .*)$", re.sub(r"\{\{[^}]*\}\}", "JOB", rule["annotations"]["description"]))
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.split("\n")] + spans + said


def commands() -> list[tuple[str, ...]]:
    found = []
    for line in lines():
        if re.match(r"elasticd [a-z]+( |$)", line) and "…" not in line:
            words = shlex.split(line, comments=True)
            # `elasticd jobs: the store does not answer …` is what it says, `elasticd explain` in a sentence a name.
            if not words[1].endswith(":") and words[1:] not in NAMES and tuple(words) not in found:
                found.append(tuple(words))
    return found


def test_page_has_commands() -> None:
    found = commands()
    assert len(found) > 30
    assert {words[1] for words in found} == {*AGENT_COMMANDS, "dump", "explain", "doctor", "config"}


def test_number_of_series_is_that_of_the_metrics() -> None:
    assert f"at most {max_series(8)} series for a job with 8 ranks" in PAGE


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_elasticd_commands_parse(words: tuple[str, ...], tmp_path: Path) -> None:
    _, name, *rest = words
    if name == "config":
        (file,) = [word for word in rest[1:] if not word.startswith("-")]
        assert file in ("FILE", "/etc/elasticd/agent.toml")
        (tmp_path / "agent.toml").write_text("")
        here = [str(tmp_path / "agent.toml") if word == file else word for word in rest]
        assert config(here, {"ELASTICD_STATE_DIR": str(tmp_path)}) == 0
    elif name == "doctor":
        doctor.build_parser().parse_args(rest)
    else:
        verbs.build_parser(name).parse_args(rest)


def test_files_to_install_exist() -> None:
    for line in lines():
        for word in re.findall(r"(?<![\w./])(?:deploy|examples|tests)/[\w./*-]+", line):
            assert list(ROOT.glob(word)), word


def test_runbook_sections_are_complete() -> None:
    _, _, runbook = PAGE.partition("\n# Runbook\n")
    sections = re.split(r"^## ", runbook, flags=re.MULTILINE)[1:]
    assert len(sections) > 13
    for section in sections:
        name, _, body = section.partition("\n")
        said = [word for word in ("**Means**", "**elasticd has**", "**Do", "**Escalate**") if word not in body]
        assert not said, f"{name}: {said}"
        assert "elasticd " in "".join(re.findall(r"```(.*?)```", body, re.DOTALL)), f"{name}: no command to type"

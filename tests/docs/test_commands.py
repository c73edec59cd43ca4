"""Every command of elasticd on any page, and in the alerts' texts, is one that its parser takes: people type these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from docs.generate.man import all_parsers
from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from elasticd_daemon.cli import job_commands as verbs
from tests.docs.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
VALUES = {"$N": "0", "$SLURM_JOB_NUM_NODES": "4", "$SLURM_JOB_ID": "123", "$HEAD": "node-1", "$PWD": "/home/me"}
VALUES |= {"--rank K": "--rank 0", "--round N": "--round 1", "[": "", "]": "", "N workers": "2 workers"}
NAMES = {"elasticd explain --json", "elasticd submit --check"}
"""The name of an option in a sentence."""


def typed(text: str) -> Iterator[str]:
    """The lines of blocks, without what they say of themselves, and the code in sentences."""
    for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n *", " ", block).split("\n") if kind in ("", "sh", "console") else ():
            yield re.split(r"  +| # ", line.strip())[0].removeprefix("$ ")
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text: str) -> Iterator[list[str]]:
    """The words from the verb on."""
    for line in typed(text):
        found = re.match(r"(?:srun .* |sudo (?:-u elasticd )?)?elasticd (?=[a-z]+ [^:])(?!run --help)(.+)$", line)
        if found and "…" not in line and line not in NAMES:
            command = found[1]
            for name, value in VALUES.items():
                command = command.replace(name, value)
            words = shlex.split(re.split(r" [|&>;]", command)[0], comments=True)
            yield words[: words.index("--")] if "--" in words else words


def refusal(words: list[str]) -> str:
    """The sentence about a command that its parser does not take; "" also for a part of `elasticd run …`."""
    verb, *rest = words
    sentences = []
    for parser in PARSERS[verb]:
        try:
            parser(rest)
        except (UsageError, SystemExit) as error:
            sentences.append(f"elasticd {shlex.join(words)}: {error}")
    return sentences[0] if len(sentences) == len(PARSERS[verb]) else ""


def _run(arguments: list[str]) -> None:
    if arguments[-1].endswith(".py") or "-m" in arguments[-2:]:
        parse_run(arguments, {}, ROOT)


PARSERS: dict[str, list[Callable[[list[str]], object]]] = {
    verb: [parser.parse_args, *([verbs.build_parser(verb).parse_args] if verb in ("dump", "explain") else [])]
    for verb, parser in all_parsers().items()
}
"""Of two, one is for a job, the other for this machine."""
PARSERS["run"] = [_run]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_parse(page: Path) -> None:
    assert [why for words in commands(page.read_text()) if (why := refusal(words))] == []


def test_commands_of_alerts_parse() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    described = [re.sub(r"\{\{[^}]*\}\}", "JOB", rule["annotations"]["description"]) for rule in rules]
    # `: elasticd jobs` at the end of a description is the command to type.
    found = [shlex.split(line)[1:] for text in described for line in re.findall(r": (elasticd .*)$", text)]
    assert found
    assert [why for words in found if (why := refusal(words))] == []


def test_wrong_command_is_found() -> None:
    text = "```sh\nelasticd drain n1 --wiat   # typing\n```\n`elasticd run --nnodes x train.py`, `elasticd logs JOB`"
    assert [bool(refusal(words)) for words in commands(text)] == [True, True, False]
    assert sum(len([*commands(page.read_text())]) for page in PAGES) > 100

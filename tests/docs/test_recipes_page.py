"""docs/recipes.md: its lines are in examples that tests run, there are few of them, and its commands parse."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
EXAMPLES = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
DIFFS = [
    (title, [line[1:].strip() for line in block.splitlines() if line.startswith("+")])
    for title, text in SECTIONS
    for block in re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]
NAMED = {
    "To the exact step": ["plain_with_elasticd.py", "train_lm.py"],
    "FSDP2 and DCP": ["train_fsdp.py"],
    "Hugging Face Trainer": ["hf_trainer.py"],
    "Accelerate": ["accelerate_loop.py"],
    "Lightning": ["lightning_fit.py"],
    "Gradient accumulation": ["train_compiled.py"],
    "Logs without double steps": ["train_compiled.py"],
}


@pytest.mark.parametrize(("title", "added"), DIFFS, ids=[title for title, _ in DIFFS])
def test_diff_is_what_the_example_has(title: str, added: list[str]) -> None:
    assert 0 < len(added) <= 5
    if title == "The multi-GPU tutorial":
        return  # the script is as it was
    lines = [line.strip() for line in EXAMPLES[NAMED[title][0]].splitlines()]
    assert [line for line in added if line not in lines] == []


def test_every_recipe_has_an_example_that_a_test_runs() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    table = set(re.findall(r"`(\w+\.py)`", PAGE.partition("\n## ")[0]))
    assert table == {name for names in NAMED.values() for name in names} | {"plain_torchrun_script.py"}
    assert [name for name in table if name not in EXAMPLES or f'"{name}"' not in tests] == []


# Options of Slurm's, enroot's and docker's manuals, and Pyxis' of its `srun --help`.
OPTIONS = {
    "srun": [
        *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "kill-on-bad-exit", "wait", "export"),
        *("container-image", "container-mounts", "container-workdir", "container-name", "container-save"),
        *("container-mount-home", "no-container-mount-home", "container-remap-root", "no-container-remap-root"),
        *(
            "container-entrypoint",
            "no-container-entrypoint",
            "container-writable",
            "container-readonly",
            "container-env",
        ),
    ],
    "docker run": ["gpus", "ipc", "ulimit", "volume", "shm-size", "rm", "network", "env", "workdir"],
    "enroot import": ["output"],
    "enroot create": ["name", "force"],
    "enroot start": ["rw", "root", "mount", "env", "conf", "rc"],
    "enroot export": ["output", "force"],
}
SWITCHES = {"no-container-mount-home", "container-mount-home", "rw", "root", "force", "rm"}
COMMANDS = [
    shlex.split(line.replace("$HEAD", "node-1").replace("$SLURM_JOB_ID", "4711").replace("$PWD", "/home/me"))
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_page_has_commands() -> None:
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_commands_parse(words: list[str]) -> None:
    (name,) = [name for name in OPTIONS if words[: len(name.split())] == name.split()]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for option in OPTIONS[name]:
        parser.add_argument(f"--{option}", **({"action": "store_true"} if option in SWITCHES else {}))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words[len(name.split()) :])
    assert given.words
    for mount in (getattr(given, "container_mounts", None) or "").split(","):
        assert not mount or re.fullmatch(r"/[^:]*:/[^:]*", mount)

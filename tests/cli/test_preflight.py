"""What cannot work on this machine is one sentence before anything starts. Real files, ports and permissions."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent import preflight
from elasticd_agent.arguments import parse_run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    place = tmp_path / "a place with späces"
    place.mkdir()
    (place / "train.py").write_text("raise SystemExit('was run')\n")
    (place / "a file").touch()
    (place / "dir").mkdir()
    (place / "app").mkdir()
    (place / "app" / "__main__.py").touch()
    (place / "mine").mkdir()
    (place / "mine" / "__init__.py").write_text("raise SystemExit('was imported')\n")
    (place / "tool").write_text("#!/bin/sh\n")
    (place / "tool").chmod(0o755)
    os.mkfifo(place / "pipe")
    return place


def check(here: Path, *argv: str, **environ: str) -> None:
    environ = {"PATH": os.environ["PATH"], **environ}
    spec, _, settings = parse_run(argv, environ, here)
    preflight.check(spec, settings, environ)


RIGHT = [
    ["train.py"],
    ["app"],
    ["-m", "mine.train"],
    ["-m", "json.tool"],
    ["-m", "sys"],
    ["--no-python", "./tool"],
    ["--no-python", "true"],
    ["--checkpoint-dir", "new/deep", "--log-dir", "dir", "--event-log", "dir/events.jsonl", "train.py"],
    ["--log-dir", "/dev/null", "train.py"],
    ["--metrics-port", "0", "train.py"],
    ["--metrics-port", "0", "--metrics-addr", "::1", "train.py"],
]


@pytest.mark.parametrize("argv", RIGHT, ids=" ".join)
def test_what_can_work_passes_and_changes_nothing(here: Path, argv: list[str]) -> None:
    before = sorted(here.rglob("*"))
    check(here, *argv)
    assert sorted(here.rglob("*")) == before


WRONG = [
    (["nope.py"], "the script 'nope.py' does not exist in "),
    (["/nope.py"], "the script '/nope.py' does not exist$"),
    (["dir"], "is a directory without a __main__.py"),
    (["pipe"], "is not a file"),
    (["train.py/x"], "does not exist"),
    (["--", "--lr", "3"], "name is missing before '--lr'"),
    (["-m", "nonesuch.train"], "there is no module 'nonesuch'"),
    (["-m", "train.py"], "write -m train, or leave -m out"),
    (["-m", "./train.py"], "without -m it is a script's path"),
    (["--no-python", "nonesuch"], "cannot be found or is not executable"),
    (["--no-python", "./train.py"], "cannot be found or is not executable"),
    (["--checkpoint-dir", "a file", "train.py"], "--checkpoint-dir .* is a file, not a directory"),
    (["--checkpoint-dir", "a file/deep", "train.py"], "deep'?: '.*a file' is a file, not a directory"),
    (["--log-dir", "a file", "train.py"], "--log-dir .* is a file"),
    (["--event-log", "dir", "train.py"], "is a directory; name a file"),
    (["--event-log", "no/such/e.jsonl", "train.py"], "there is no directory"),
    (["--metrics-port", "0", "--metrics-addr", "no.such.host.invalid", "train.py"], "cannot be resolved"),
    (["--metrics-port", "0", "--metrics-addr", "192.0.2.1", "train.py"], "not an address of this machine"),
    (["--master-addr", "192.0.2.1", "--master-port", "0", "train.py"], "not an address of this machine"),
]


@pytest.mark.parametrize(("argv", "sentence"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_what_cannot_work_is_said(here: Path, argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check(here, *argv)


@pytest.mark.parametrize("option", ["--master-port", "--metrics-port"])
def test_a_port_in_use_is_said(here: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use"):
            check(here, option, port, "train.py")
    check(here, option, port, "train.py")


def test_another_interpreter_must_be_there_and_is_not_asked_for_modules(here: Path) -> None:
    with pytest.raises(UsageError, match="PYTHON_EXEC"):
        check(here, "train.py", PYTHON_EXEC="/no/such/python")
    check(here, "-m", "nonesuch", PYTHON_EXEC=str(here / "tool"))


def test_a_script_that_may_not_be_read_is_said(here: Path) -> None:
    (here / "train.py").chmod(0)
    (here / "dir").chmod(0o555)
    if os.geteuid() != 0:
        with pytest.raises(UsageError, match="permission denied"):
            check(here, "train.py")
        return
    # Root may read everything, so it is another user's process that looks.
    look = (
        "import os, sys; from pathlib import Path\n"
        "from elasticd_agent import arguments, preflight\n"
        "from elasticd.errors import UsageError\n"
        "commands = (['train.py'], ['--event-log', 'dir/e.jsonl', 'app'])\n"
        "asked = [arguments.parse_run(argv, {'PYTHON_EXEC': '/bin/sh'}, Path('.')) for argv in commands]\n"
        "os.chdir(sys.argv[1]); os.setregid(65534, 65534); os.setreuid(65534, 65534)\n"
        "for spec, _, settings in asked:\n"
        "    try: preflight.check(spec, settings, {})\n"
        "    except UsageError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", look, str(here)], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.stdout.splitlines() == [
        "the script 'train.py' cannot be read: permission denied",
        "--event-log 'dir/e.jsonl' cannot be written: permission denied",
    ], run.stderr

"""The unit file as read by systemd-analyze and, without it, by a parser.

tests/systemd starts it under a booted systemd; this is what that cannot show.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "systemd"
UNIT = DEPLOY / "elasticd-agent.service"
PAGE = ROOT / "docs" / "systemd.md"

ANALYZE = shutil.which("systemd-analyze")
EXPOSURE = 2.8
"""As systemd 252 counts; other versions count a little differently."""


def settings() -> dict[str, list[str]]:
    """Setting → its values; comments and sections left out."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, equals, value = line.partition("=")
            assert equals and re.fullmatch("[A-Za-z]+", name), f"neither a setting nor a comment: {line!r}"
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, for a program that is there: systemd-analyze looks for it."""
    made = tmp_path / UNIT.name
    made.write_text(UNIT.read_text().replace("/opt/elasticd/venv/bin/python", sys.executable))
    return made


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here: the parser below has to do")
def test_systemd_analyze_verify(unit: Path) -> None:
    assert ANALYZE
    done = subprocess.run([ANALYZE, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    # It answers 0 to a key it does not know, too.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nKillMood=process"))
    done = subprocess.run([ANALYZE, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    assert "KillMood" in done.stderr, "this test would not see a mistake"


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
def test_exposure_matches_the_page(unit: Path) -> None:
    assert ANALYZE
    command = [ANALYZE, "security", "--offline=true", f"--threshold={EXPOSURE * 10 + 2:.0f}", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot read a unit that is not installed")
    assert done.returncode == 0, done.stdout[-400:]
    assert f"exposure of **{EXPOSURE}**" in PAGE.read_text()


def test_page_explains_every_setting() -> None:
    page = PAGE.read_text()
    ignored = {"Description", "After", "Wants", "WantedBy"}
    missing = [name for name in settings() if name not in ignored and not re.search(rf"`{name}[=`]", page)]
    assert not missing


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("StartLimitIntervalSec", "0", "systemd must not give up"),
        ("RuntimeDirectoryPreserve", "restart", "the socket's folder outlives the agent"),
        ("StateDirectoryMode", "0700", "orders hold credentials"),
        ("LimitMEMLOCK", "infinity", "RDMA"),
        ("OOMPolicy", "continue", "a worker out of memory does not end the others"),
        ("User", "elasticd", "checkpoints belong to somebody"),
        ("NoNewPrivileges", "yes", "jobs get no more rights"),
    ],
)
def test_essential_settings(name: str, value: str, why: str) -> None:
    assert settings().get(name) == [value], why


@pytest.mark.parametrize(
    "name", ["PrivateTmp", "PrivateDevices", "DeviceAllow", "ProtectClock", "DynamicUser", "Delegate", "ProtectProc"]
)
def test_settings_that_break_jobs_are_absent(name: str) -> None:
    assert name not in settings()


def test_watchdog_is_shorter_than_adoption() -> None:
    """A hung agent is replaced before its runners think that nobody will come: watchdog + abort + restart < 60 s."""
    seconds = [
        float(settings()[name][0].removesuffix("s")) for name in ("WatchdogSec", "TimeoutAbortSec", "RestartSec")
    ]
    assert seconds[0] > 0
    assert sum(seconds) < 50


def test_scripts_are_valid_for_their_shells() -> None:
    for name, shell in (
        ("install.sh", "bash"),
        ("uninstall.sh", "bash"),
        ("elasticd-end-left", "sh"),
        ("elasticd-devices", "sh"),
    ):
        script = DEPLOY / name
        assert script.stat().st_mode & 0o111 == 0o111, f"{name} is not executable"
        assert script.read_text().splitlines()[0].endswith(shell)
        done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("install.sh", ["--prefix"], "--prefix needs a value"),
        ("install.sh", ["--prefix", "opt"], "an absolute path is needed"),
        ("install.sh", ["--python", "python3"], "an absolute path is needed"),
        ("install.sh", ["--prefix", "/opt/a b"], "a unit file does not support"),
        ("install.sh", ["--frm", "x"], "unknown option --frm; there are --prefix, --from, --python and --no-start"),
        ("uninstall.sh", ["--prefix", "/"], "an absolute path is needed"),
        ("uninstall.sh", ["--force"], "unknown option --force; there are --prefix and --purge"),
    ],
)
def test_command_line_errors(script: str, arguments: list[str], says: str) -> None:
    done = subprocess.run([str(DEPLOY / script), *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


@pytest.mark.parametrize("script", ["install.sh", "uninstall.sh"])
def test_help_is_the_header_comment(script: str) -> None:
    done = subprocess.run([str(DEPLOY / script), "--help"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    assert "--prefix" in done.stdout
    assert "set -euo" not in done.stdout

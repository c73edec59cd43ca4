"""The operator's own checks: their reason, their deadline, and no process left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elasticd_daemon.health import check_process as examiner
from tests.daemon.health.conftest import Node, until


@pytest.mark.parametrize(
    ("script", "outcome", "why"),
    [
        ("exit 0", "passed", "exit code 0"),
        ("echo '  port 1 is up  '; echo more", "passed", "port 1 is up"),
        ("echo port 1 is down; echo more; exit 3", "failed", "port 1 is down"),
        ("echo port 1 is down >&2; exit 1", "failed", "port 1 is down"),
        ("exit 4", "failed", "it exited with 4 and wrote nothing"),
        ("kill -SEGV $$", "failed", "it was killed by SIGSEGV"),
        ("echo about to die; kill -9 $$", "failed", "it was killed by SIGKILL: about to die"),
        (r"printf '\033[31mred\007\377\n'; exit 1", "failed", "·[31mred·�"),
        ("head -c 100000 /dev/zero | tr '\\0' x; exit 1", "failed", "x" * 199 + "…"),
        ("exec yes", "failed", "it wrote more than 1 MiB; only the first line counts"),
        ("exit 125", "failed", "it exited with 125 and wrote nothing"),
    ],
)
def test_first_line_of_output_is_the_reason(node: Node, script: str, outcome: str, why: str) -> None:
    node.plugin("10-test", script)
    found = node.run()["plugin 10-test"]
    assert (found.outcome, found.why) == (outcome, why)


@pytest.mark.parametrize(
    "script", ["sleep 1000", "trap '' TERM INT HUP; sleep 1000 & wait; sleep 1000", "kill -STOP $$"]
)
def test_hanging_plugin_is_killed_at_its_deadline(node: Node, script: str) -> None:
    node.plugin("10-hangs", script)
    found = node.with_health(plugin_timeout_s=0.3).run()["plugin 10-hangs"]
    assert found.why == "no result within 0.3 s"
    assert 0.3 <= found.seconds < 30


def test_hanging_plugin_delays_no_other(node: Node) -> None:
    node.plugin("10-hangs", f"until [ -e {node.tmp}/well ]; do sleep 0.01; done; echo both ran")
    node.plugin("20-well", f": > {node.tmp}/well; echo well")
    found = node.run()
    assert (found["plugin 10-hangs"].why, found["plugin 20-well"].why) == ("both ran", "well")


def test_children_of_a_plugin_are_killed(node: Node) -> None:
    pids = node.tmp / "pids"
    node.plugin(
        "10-forks",
        f"""
        sleep 1000 & echo $! >> {pids}
        setsid sh -c 'echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait' > /dev/null 2>&1 &
        (setsid sh -c 'echo $$ >> {pids}; exec sleep 1000' &)
        while [ "$(wc -l < {pids})" -lt 4 ]; do sleep 0.01; done
        echo done""",
    )
    assert node.run()["plugin 10-forks"].why == "done"
    started = pids.read_text().split()
    assert len(started) == 4
    until(lambda: not any(Path("/proc", pid).exists() for pid in started), "end of the plugin's children")


def test_plugin_environment_is_clean(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    seen = node.tmp / "seen"
    node.plugin("10-env", f"env > {seen}; pwd >> {seen}")
    lists = node.plugin("20-fds", "")
    lists.write_text(f"#!{sys.executable} -IS\nimport os\nprint(*os.listdir('/proc/self/fd'))\n")
    found = node.run()
    lines = seen.read_text().splitlines()
    names = {line.partition("=")[0] for line in lines[:-1]}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {"PATH", "LANG", "HOME", "ELASTICD_NODE", "ELASTICD_SLOTS"}
    assert "ELASTICD_NODE=node-1" in lines
    assert lines[-1] == "/"
    assert set(found["plugin 20-fds"].why.split()) == {"0", "1", "2", "3"}  # the last one is what lists them


def test_parallel_plugins_are_limited(node: Node) -> None:
    log = node.tmp / "log"
    for number in range(9):
        meets = f"until [ $(grep -c + {log}) -ge 4 ]; do sleep 0.01; done"
        node.plugin(f"{number}-p", f"echo + >> {log}; {meets}; sleep 0.2; echo - >> {log}")
    assert all(reading.outcome != "failed" for reading in node.run().values())
    running, most = 0, 0
    for sign in log.read_text().split():
        running += 1 if sign == "+" else -1
        most = max(most, running)
    assert (len(log.read_text().split()), most) == (18, 4)


@pytest.mark.parametrize(
    ("mode", "why"),
    [(0o757, "is writable by everybody; chmod o-w"), (0o644, "is not executable; chmod +x it, or remove it")],
)
def test_unsafe_plugin_is_refused(node: Node, mode: int, why: str) -> None:
    path = node.plugin("10-refused", f"echo ran > {node.tmp}/ran", mode)
    found = node.run()["plugin 10-refused"]
    assert found.outcome == "skipped"
    assert found.why.startswith(f"not run: {path} {why}")
    assert not (node.tmp / "ran").exists()


def test_writable_directory_runs_no_plugin(node: Node) -> None:
    node.plugin("10-test", f"echo ran > {node.tmp}/ran")
    node.plugins.chmod(0o777)
    found = node.run()["plugins"]
    assert (found.outcome, found.why) == (
        "skipped",
        f"none is run: {node.plugins} is writable by everybody; chmod o-w {node.plugins}",
    )
    assert not (node.tmp / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_plugin_of_another_user_is_refused(node: Node) -> None:
    path = node.plugin("10-test", "exit 0")
    os.chown(path, 4242, -1)
    assert "belongs to user 4242" in node.run()["plugin 10-test"].why


def test_backup_files_are_ignored(node: Node) -> None:
    for name in (".hidden", "10-test~", "10-test.bak", "#10-test#", "README.md"):
        node.plugin(name, "exit 1")
    (node.plugins / "folder").mkdir()
    assert not [name for name in node.run() if name.startswith("plugin")]


def test_missing_interpreter_is_skipped(node: Node) -> None:
    path = node.plugins / "10-test"
    path.write_text("#!/there/is/no/shell\n")
    path.chmod(0o755)
    found = node.run()["plugin 10-test"]
    assert (found.outcome, found.why) == ("skipped", f"{path} cannot be executed: No such file or directory")


def test_cancelled_run_leaves_no_process(node: Node) -> None:
    """As when the agent is killed: the check process reads the end of its standard input."""
    import json
    import subprocess

    pid = node.tmp / "pid"
    path = node.plugin("10-hangs", f"echo $$ > {pid}; exec sleep 1000")
    requested = {
        "directories": [], "plugins": [{"check": "p", "path": str(path)}], "at_once": 4, "directory_s": 60,
        "plugin_s": 60, "environment": {"PATH": "/bin:/usr/bin"},
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", examiner.__name__],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(json.dumps(requested).encode() + b"\n")
        process.stdin.flush()
        until(lambda: pid.exists() and pid.read_text().strip(), "plugin")
        process.stdin.close()
        assert process.wait(60) == 0
    until(lambda: not Path("/proc", pid.read_text().strip()).exists(), "end of the plugin")


@pytest.mark.parametrize(
    ("output", "line"), [(b"", ""), (b"\n\n  a \nb", "a"), ("ü\u2028x".encode(), "ü"), (b"\xff\xfe", "��")]
)
def test_the_first_line(output: bytes, line: str) -> None:
    assert examiner.first_line(output) == line

"""The command line itself: its speed, its streams, its exit codes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.cli.main import COMMANDS

COMMAND = [sys.executable, "-m", "elasticd_agent"]


def elasticd(*argv: str | bytes, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command: list[str | bytes] = [*COMMAND, *argv]
    return subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", timeout=60, cwd=cwd, check=False
    )


PAGES_AND_MISTAKES = [
    ["run", "--help"],
    ["run", "--no-such-flag", "x.py"],
    ["run", "nope.py"],
    ["run", "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-id", "j", "--rdzv-endpoint", "h:", "x.py"],
    [
        "run",
        "--nproc-per-node",
        "2:4",
        "--nnodes=2",
        "--rdzv-backend=etcd",
        "--rdzv-endpoint=h",
        "-t",
        "3",
        "-m",
        "nope",
    ],
    ["--help"],
]
"""Command lines that start nothing."""
SLOW = {
    *("asyncio", "concurrent.futures", "http.server", "logging", "multiprocessing", "ssl", "subprocess"),
    *("elasticd.session", "elasticd.checkpointing.storage.manifest", "elasticd.checkpointing.storage.object_store"),
    *("elasticd_agent.job.run", "elasticd_daemon", "elasticd_agent.store.open", "elasticd_agent.telemetry"),
}


@pytest.mark.parametrize("argv", PAGES_AND_MISTAKES)
def test_help_and_mistakes_import_nothing_slow(argv: list[str], tmp_path: Path) -> None:
    """Of Python and of elasticd only what they need, of other packages nothing."""
    look = (
        "import sys; before = set(sys.modules); from elasticd_agent.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*set(sys.modules) - before, file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", look, *argv], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    imported = set(run.stderr.splitlines()[-1].split())
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"elasticd", "elasticd_agent"}
    assert imported & SLOW == set()


@pytest.mark.parametrize("argv", PAGES_AND_MISTAKES)
def test_help_and_mistakes_cost_less_than_twenty_starts_of_the_interpreter(argv: list[str]) -> None:
    def cpu_s(*command: str) -> float:
        # Not the wall time: other work may have the CPUs.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare_s = min(cpu_s(sys.executable, "-I", "-S", "-c", "") for _ in range(5))
    assert min(cpu_s(*COMMAND, *argv) for _ in range(3)) < 20 * bare_s


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["run", "nope.py"], "elasticd run: error: the script 'nope.py' does not exist in "),
        (["run", "two\nlines.py"], "elasticd run: error: the script 'two\\nlines.py' does not exist in "),
        (["run", "--two\nlines", "x.py"], "elasticd run: error: unknown option --two\\nlines"),
        (["run", b"\xff.py"], "elasticd run: error: the script '\\udcff.py' does not exist in "),
        (
            ["run", "--max-restarts", "x", "x.py"],
            "elasticd run: error: argument --max-restarts/--max_restarts: invalid",
        ),
        (["run"], "elasticd run: error: the script to run is missing"),
        (
            ["run", "--nnodes", "2", "x.py"],
            "elasticd run: error: --nnodes 2 needs --master-addr HOST --master-port PORT of the first node",
        ),
        (["run", "--rdzv-conf", "le\nase=1", "x.py"], "elasticd run: error: --rdzv-conf: unknown key 'le\\nase'"),
        (["walk", "x.py"], "elasticd: error: unknown command 'walk'; there are run, "),
        (["statu"], "elasticd: error: unknown command 'statu'; did you mean status?"),
        (
            ["run", "--preload", "nosuch", __file__],
            "elasticd run: error: --preload nosuch: there is no module 'nosuch'",
        ),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(argv: list[str | bytes], line: str, tmp_path: Path) -> None:
    run = elasticd(*argv, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(line)
    assert run.stderr.count("\n") == 1


def test_help_and_version() -> None:
    for argv in (["--help"], ["run", "--help"], ["run", "-h"], ["run", "--nproc-per-node", "2", "-h"], ["--version"]):
        run = elasticd(*argv)
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.startswith("elasticd " if argv == ["--version"] else "usage: elasticd run [options] SCRIPT")


def test_help_lists_every_command_in_a_line() -> None:
    page = elasticd()
    assert (page.returncode, page.stderr) == (0, "")
    assert elasticd("help").stdout == page.stdout
    assert max(map(len, page.stdout.splitlines())) <= 110
    for name in COMMANDS:
        assert len([line for line in page.stdout.splitlines() if line.startswith(f"  {name} ")]) == 1
    assert elasticd("help", "drain").stdout == elasticd("drain", "--help").stdout
    assert elasticd("help", "nope").returncode == 2


def test_help_in_the_c_locale() -> None:
    run = subprocess.run(
        [*COMMAND, "run", "--help"],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )
    assert (run.returncode, run.stderr) == (0, b"")


def test_no_module_of_the_agent_imports_torch() -> None:
    look = (
        "import importlib, pkgutil, sys, elasticd_agent\n"
        "for module in pkgutil.walk_packages(elasticd_agent.__path__, 'elasticd_agent.'):\n"
        "    if module.name not in ('elasticd_agent.__main__', 'elasticd_agent.workers.launcher.template'):\n"
        "        importlib.import_module(module.name)\n"
        "        assert not {'torch', 'numpy'} & set(sys.modules), module.name\n"
        "assert 'elasticd_agent.job.run' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", look], timeout=60, check=True)


def test_missing_current_directory_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run_it = "from elasticd_agent.cli.main import main; sys.exit(main(['run', 'x.py']))"
    leave = f"import os, sys; os.rmdir(os.getcwd()); {run_it}"
    run = subprocess.run(
        [sys.executable, "-c", leave], capture_output=True, text=True, timeout=60, cwd=gone, check=False
    )
    assert run.returncode == 2
    assert run.stderr == ("elasticd run: error: the current directory does not exist; change to one that does\n")


def test_process_ends_without_finalization_and_prints_everything() -> None:
    """Daemon threads run to the end; taking the interpreter apart under them has ended an agent by SIGSEGV."""
    program = (
        "import atexit, os, sys; atexit.register(os._exit, 99); sys.argv = ['elasticd', 'help']\n"
        "from elasticd_agent.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "elasticd docs cli" in done.stdout

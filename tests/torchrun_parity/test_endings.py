"""However a worker ends, what it said, how it ended and what it left for the launcher are as under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.workers.launcher.requests import find_script, plan_preload, substitute_local_rank
from tests.torchrun_parity.launching import DEADLINE_S, TORCHRUN, Both, Launched, Outcome, copied, under

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

ATTEMPTS = 7
CODES = [3, -signal.SIGKILL, 3, -signal.SIGSEGV, 1, -signal.SIGABRT, 1]


def attempts(outcome: Outcome) -> list[list[dict[str, Any]]]:
    """Per attempt, what each program that ran in it reported."""
    paths = [outcome.out / f"attempt-{number}" for number in range(ATTEMPTS)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def test_exit_codes_and_signals_are_reported(endings: Both) -> None:
    seen = [
        event["exit_code"] if event["signal"] is None else -event["signal"]
        for event in endings.elasticd.events("worker_exited")
    ]
    assert seen == CODES
    assert [int(code) for code in re.findall(r"exitcode: (-?\d+)\)", endings.torchrun.stderr)] == CODES
    assert endings.elasticd.code == endings.torchrun.code == 1


def test_every_start_was_warm(endings: Both) -> None:
    assert endings.elasticd.warm
    assert len(endings.elasticd.events("group_started")) == ATTEMPTS


def test_no_output_is_lost(endings: Both) -> None:
    """Nothing said is lost."""
    for number in range(ATTEMPTS):
        said = f"attempt {number} on stdout;"
        assert endings.elasticd.stdout.count(said) == endings.torchrun.stdout.count(said) > 0
        ours, theirs = (
            (outcome.out / f"stderr-{number}").read_text() for outcome in (endings.elasticd, endings.torchrun)
        )
        assert ours == theirs
        assert f"attempt {number} on stderr;" in ours


def test_traceback_and_error_file_are_the_same(endings: Both) -> None:
    found = []
    for outcome in (endings.elasticd, endings.torchrun):
        assert "ValueError: the script's own mistake: ü" in (outcome.out / f"stderr-{ATTEMPTS - 1}").read_text()
        error = json.loads((outcome.out / "error.json").read_text())
        error["message"]["extraInfo"].pop("timestamp")
        found.append(error)
    assert found[0] == found[1]


def test_a_program_the_worker_turns_into_is_no_launcher(endings: Both) -> None:
    ours, theirs = attempts(endings.elasticd)[5], attempts(endings.torchrun)[5]
    assert [report["again"] for report in ours] == [False, True]
    for key in ("argv", "python path", "launcher's"):
        assert [report[key] for report in ours] == [report[key] for report in theirs]


def test_numpy_has_its_threads_when_it_is_imported(endings: Both) -> None:
    """One worker, OMP_NUM_THREADS unset: the launcher held numpy in one thread, the script must not."""
    ours, theirs = (attempts(outcome)[0][0] for outcome in (endings.elasticd, endings.torchrun))
    assert ours["threads before numpy"] == theirs["threads before numpy"] == 1
    assert ours["blas"] == theirs["blas"] == min(len(os.sched_getaffinity(0)), 64)


@pytest.mark.parametrize("stream", ["random", "numpy", "torch", "seed"])
def test_random_streams_differ_from_restart_to_restart(endings: Both, stream: str) -> None:
    first, second = (reports[0][stream] for reports in attempts(endings.elasticd)[:2])
    assert first != second


def test_leaves_no_process_behind(endings: Both) -> None:
    assert endings.elasticd.remains == []


def test_local_module_that_shadows_a_preloaded_one(refused: dict[str, Outcome], folder: Path) -> None:
    """A local module that shadows a preloaded one is used."""
    outcome = refused["shadowing"]
    assert outcome.facts() == {"numpy": str(folder / "shadowing" / "numpy.py"), "whose": "the script's"}
    assert not outcome.warm
    assert "numpy.py shadows a module that is preloaded" in outcome.why_cold


def test_variables_read_by_torch_at_import(refused: dict[str, Outcome]) -> None:
    """What torch reads at import has its effect."""
    outcome = refused["early"]
    assert outcome.facts() == {"threads": 1}
    assert not outcome.warm
    assert "early.py sets OMP_NUM_THREADS" in outcome.why_cold


HELPER = 'import os\nNAME = "OMP_NUM_THREADS"\nos.environ[NAME] = "2"\n'
READABLE_HELPER = HELPER + 'os.environ["OMP_NUM_THREADS"] = "2"\n'


@pytest.mark.system
@pytest.mark.parametrize(
    ("where", "options", "warm"),
    [(".", (), False), ("found at run time", (), True), ("preloaded", ("--preload", "helper"), True)],
)
def test_threads_set_by_an_imported_module(tmp_path: Path, where: str, options: tuple[str, ...], warm: bool) -> None:
    """Where its source can be found and read: a cold start. Elsewhere torch gets the threads when it is imported."""
    folder = copied(tmp_path / "job", "helped.py")
    (folder / where).mkdir(exist_ok=True)
    (folder / where / "helper.py").write_text(HELPER if warm else READABLE_HELPER)
    environment = {"HELPER": where}
    theirs = Launched(tmp_path / "torchrun", [*TORCHRUN, "--nproc-per-node", "2", "helped.py"], folder, environment)
    preloaded = {"PYTHONPATH": str(folder / where)} if options else {}
    command = ["--nproc-per-node", "2", *options, "helped.py"]
    ours = under(tmp_path / "elasticd", command, folder, environment=environment | preloaded)
    found = Both(theirs.outcome(), ours.outcome())
    for rank in (0, 1):
        assert found.elasticd.facts(rank) == found.torchrun.facts(rank)
        assert found.elasticd.facts(rank)["threads"] == 2
    assert found.elasticd.warm is warm
    assert warm or "helper.py sets OMP_NUM_THREADS" in found.elasticd.why_cold


def test_variable_set_too_late_for_the_warm_launcher(tmp_path: Path) -> None:
    """Only running the script shows it, so a line says that it has no effect."""
    folder = copied(tmp_path / "job", "helped.py")
    (folder / "found at run time").mkdir()
    (folder / "found at run time" / "helper.py").write_text(
        HELPER.replace("OMP_NUM_THREADS", "TORCH_SHOW_CPP_STACKTRACES")
    )
    environment = {"HELPER": "found at run time", "OMP_NUM_THREADS": "1"}
    outcome = under(tmp_path / "elasticd", ["helped.py"], folder, environment=environment).outcome()
    assert outcome.facts()["threads"] == 1
    assert outcome.stderr.count("TORCH_SHOW_CPP_STACKTRACES was changed before torch read it") == 1


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ('os.environ["TORCH_LOGS"] = "+dynamo"', "TORCH_LOGS"),
        ('os.environ.setdefault("OMP_NUM_THREADS", "1")', "OMP_NUM_THREADS"),
        ('os.environ.update(MKL_NUM_THREADS="1")', "MKL_NUM_THREADS"),
        ('os.environ["NCCL_DEBUG"] = "INFO"', None),
        ('os.environ["TOKENIZERS_PARALLELISM"] = "false"', None),
    ],
)
def test_a_variable_set_before_torch_is_imported(tmp_path: Path, line: str, variable: str | None) -> None:
    """Said at once, before anything is preloaded; after the import it changes nothing in torch either."""
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{line}\nimport torch\n")
    cold = plan_preload(script, (), ()).cold_reason
    assert (cold is None) if variable is None else (cold is not None and variable in cold)
    script.write_text(f"import os\nimport torch\n{line}\n")
    assert plan_preload(script, (), ()).cold_reason is None


@pytest.mark.parametrize(("encoding", "first"), [("utf-8-sig", ""), ("latin-1", "# coding: latin-1\n")])
def test_a_script_in_another_encoding_is_read_as_python_does(tmp_path: Path, encoding: str, first: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{first}import os\nos.environ['TORCH_LOGS'] = 'é'\nimport torch\n", encoding=encoding)
    cold = plan_preload(script, (), ()).cold_reason
    assert cold is not None and "sets TORCH_LOGS," in cold


def test_a_script_that_no_compiler_takes_is_no_obstacle(tmp_path: Path) -> None:
    """The worker's own traceback explains it."""
    (tmp_path / "train.py").write_text("x = " + "+".join("1" * 50_000))
    assert plan_preload(tmp_path / "train.py", (), ()).cold_reason is None


@pytest.mark.parametrize(
    ("lines", "variable"),
    [
        ("import torch\nos.environ['TORCH_COMPILE_DISABLE'] = '1'", "TORCH_COMPILE_DISABLE"),
        ("import torch\ndef main():\n    os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        ("os.environ['CXX'] = 'g++-12'\nimport torch", "CXX"),
        ("import torch\nimport settings", "TORCHDYNAMO_VERBOSE"),
        ("import torch\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '/x'", None),
        ("import torch\nos.environ['OMP_NUM_THREADS'] = '1'", None),
    ],
)
def test_a_variable_set_before_the_compiler_is_imported(tmp_path: Path, lines: str, variable: str | None) -> None:
    """torch imports its compiler when something is compiled, and the template before."""
    (tmp_path / "settings.py").write_text("import os\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\n")
    (tmp_path / "train.py").write_text(f"import os\n{lines}\n")
    cold = plan_preload(tmp_path / "train.py", (), (), (tmp_path,)).cold_reason
    assert (cold is None) if variable is None else (cold is not None and f"sets {variable}," in cold)


def test_what_reads_cuda_home_is_not_preloaded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\nfrom torch.utils.cpp_extension import load\nimport torch.nn\n"
    )
    modules = plan_preload(tmp_path / "train.py", (), ()).modules
    assert "torch.nn" in modules
    assert "torch.utils.cpp_extension" not in modules


@pytest.mark.parametrize(
    ("arg", "of_rank_1", "cold"),
    [
        ("cuda:${local_rank}", "cuda:1", True),
        ("cuda:$local_rank", "cuda:1", True),
        ("$local_rank.log", "1.log", True),
        ("$$local_rank", "$local_rank", False),
        ("a$$b", "a$b", False),
        ("^loss$", "^loss$", False),
        ("$local_ranks ${x} $1", "$local_ranks ${x} $1", False),
    ],
)
def test_local_rank_in_an_argument(arg: str, of_rank_1: str, cold: bool) -> None:
    """As torch.distributed.elastic.utils.api.macros has it."""
    assert substitute_local_rank(arg, 1) == of_rank_1
    assert (plan_preload(None, (arg,), ()).cold_reason is not None) is cold


@pytest.mark.parametrize(
    ("module", "entrypoint", "file"),
    [(False, "app", "app/__main__.py"), (True, "app", "app/__main__.py"), (True, "lib.train", "path/lib/train.py")],
)
def test_a_variable_set_by_a_directory_and_by_a_module_on_the_path(
    tmp_path: Path, module: bool, entrypoint: str, file: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("import os\nos.environ['TORCH_LOGS'] = 'graph'\nimport torch\n")
    found = find_script(module, entrypoint, tmp_path, [tmp_path / "path"])
    assert found == tmp_path / file
    assert "sets TORCH_LOGS" in str(plan_preload(found, (), ()).cold_reason)


def test_what_python_warns_of_in_the_script_is_said_by_the_workers_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import torch.nn\ndigits = "\\d"\n')
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert "torch.nn" in plan_preload(script, (), ()).modules
    assert not said


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({"train": "import settings\nimport torch", "settings": "{set}"}, "settings.py"),
        (
            {
                "train": "from lib.a import b\nimport torch",
                "lib/__init__": "",
                "lib/a": "from . import b",
                "lib/b": "{set}",
            },
            "b.py",
        ),
        ({"train": "import lib\nimport torch", "lib/__init__": "{set}"}, "__init__.py"),
        ({"train": "import first\nimport settings", "first": "import torch", "settings": "{set}"}, None),
        ({"train": "import one", "one": "import two", "two": "import one\nimport train\nimport torch\n{set}"}, None),
        (
            {"train": "import broken\nimport settings\nimport torch", "broken": "def", "settings": "{set}"},
            "settings.py",
        ),
        ({"train": "import torch\nimport settings", "settings": "{set}"}, None),
    ],
)
def test_a_variable_set_by_an_imported_module(tmp_path: Path, files: dict[str, str], file: str | None) -> None:
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(set='import os\nos.environ["OMP_NUM_THREADS"] = "2"\n'))
    cold = plan_preload(tmp_path / "train.py", (), (), (tmp_path,)).cold_reason
    expected = f"{file} sets OMP_NUM_THREADS, which torch reads when it is imported"
    assert cold == (expected if file is not None else None)

"""where: stacks of real hangs (torch 2.13 on gloo, Python 3.11) and of things that only look alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticd_agent.hangs.collector.classify import (
    FactsBesideStack,
    StackLocation,
    is_loading,
    locate,
    only_first_runs_script,
    representative_thread_index,
    script_function,
    script_place,
)
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.hangs.stacks import Frame
from elasticd_agent.model.reports import RankReport

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
PYTHON = "/usr/lib/python3.11"
ELASTICD = "/opt/venv/lib/python3.11/site-packages/elasticd"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"


def stack(*calls: str) -> list[Frame]:
    """From "function file:line", innermost first."""
    frames = []
    for call in calls:
        function, _, place = call.partition(" ")
        file, _, line = place.rpartition(":")
        frames.append(Frame(function, file, int(line)))
    return frames


def read_stacks() -> tuple[dict[str, list[str]], dict[str, str]]:
    """The calls of each stack of stacks.txt, and what is expected of it."""
    calls: dict[str, list[str]] = {}
    expected = {}
    for block in Path(__file__).with_name("stacks.txt").read_text().split("\n\n")[1:]:
        title, *lines = block.splitlines()
        name, _, expected[name] = title.partition(" => ")
        calls[name] = []
        for line in map(str.strip, lines):
            calls[name] += calls.get(line, [PLACES.sub(lambda place: globals()[place[0]], line)])
    return calls, expected


PLACES = re.compile(r"\b(TORCH|PYTHON|ELASTICD|C10D|DDP)\b")
STACKS, EXPECTED = read_stacks()
SCRIPT, BACKWARD, THREAD = STACKS["SCRIPT"], STACKS["BACKWARD"], STACKS["THREAD"]
WAITS = FactsBesideStack(idle=True, has_process_group=True)


@pytest.mark.parametrize("name", [name for name, what in EXPECTED.items() if what not in ("", "ignored", "counts")])
def test_locate_table(name: str) -> None:
    found = locate(stack(*STACKS[name]), WAITS)
    where, _, function = EXPECTED[name].partition(" ")
    assert found.where == where
    assert not function or found.function == function


def test_backward_waits_only_if_idle_and_in_group() -> None:
    frames = stack(*BACKWARD, *SCRIPT)
    assert locate(frames, FactsBesideStack(idle=False, has_process_group=True)) == StackLocation(
        "elsewhere", "train.py:88 train"
    )
    assert locate(frames, FactsBesideStack(idle=True, has_process_group=False)) == StackLocation(
        "elsewhere", "train.py:88 train"
    )


@pytest.mark.parametrize(
    ("source", "beside", "where"),
    [
        ("work.wait()", {"has_process_group": True, "idle": True}, "collective"),
        ("os.wait()", {"has_process_group": True, "idle": True}, "elsewhere"),
        ("work.wait()", {"has_process_group": True}, "elsewhere"),
        ("work.wait()", {"idle": True}, "elsewhere"),
        ("work.wait()", {"has_process_group": True, "uses_cuda": True}, "device"),
        ("ready, _ = worker.core_worker.wait(refs)", {"idle": True, "uses_cuda": True}, "elsewhere"),
        ("total += loss.item()", {"uses_cuda": True}, "device"),
        ("total += loss.item()", {}, "elsewhere"),
        ("total += loss.item()", {"uses_cuda": True, "holds_gil": True}, "elsewhere"),
        ("batch = batch.to(device)", {"uses_cuda": True}, "device"),
        ("print(float(loss))", {"uses_cuda": True}, "device"),
        ("batch = next(batches)", {"uses_cuda": True, "has_process_group": True, "idle": True}, "elsewhere"),
    ],
)
def test_c_method_is_found_by_source_line(source: str, beside: dict[str, bool], where: str) -> None:
    assert locate(stack(*SCRIPT), FactsBesideStack(source_line=source, **beside)).where == where


def test_wait_by_a_line_of_source_is_told_from_a_wait_by_frames_of_torch() -> None:
    """A store's `wait` is no collective's: nothing is proven by it."""
    for source, name in (
        ("work.wait()", "work.wait"),
        ("self.store.wait(keys)", "self.store.wait"),
        ("w[0].wait()", "object.wait"),
    ):
        assert (
            locate(stack(*SCRIPT), FactsBesideStack(source_line=source, idle=True, has_process_group=True)).function
            == name
        )
        rank = RankState("a", RankReport(0, 0, where="collective", function=name))
        assert rank.waits
        assert not rank.wait_is_recorded


@pytest.mark.parametrize(
    "frame",
    [
        "Pdb.interaction PYTHON/pdb.py:357",
        "PyDB._do_wait_suspend /home/me/.vscode/extensions/debugpy-1/bundled/libs/debugpy/_vendored/pydevd/pydevd.py:9",
        "_do_wait_suspend /x/debugpy/_vendored/pydevd/_pydevd_sys_monitoring/_pydevd_sys_monitoring.py:2058",
        "PyDB.do_wait_suspend /opt/pycharm/plugins/python-ce/helpers/pydev/pydevd.py:1172",
        "wait_for_client TORCH/../debugpy/public_api.py:161",
    ],
)
def test_person_at_a_debugger(frame: str) -> None:
    call = PLACES.sub(lambda place: globals()[place[0]], frame)
    frames = stack(f"Event.wait {PYTHON}/threading.py:629", call, *SCRIPT)
    assert locate(frames, WAITS).where == "debugger"


def test_locate_without_frames() -> None:
    assert locate([], WAITS) == StackLocation("elsewhere", "")
    assert script_function([]) == ""
    assert script_function(stack(*SCRIPT)) == "train.py train"


def test_debugger_that_runs_the_script_does_not_wait_for_a_person() -> None:
    """Nor does a function of the script that has the name of a prompt's."""
    assert locate(stack(*SCRIPT, f"run {PYTHON}/bdb.py:597")).where == "elsewhere"
    assert locate(stack("cmdloop /home/me/train.py:7")).where == "elsewhere"
    assert locate(stack(f"cmdloop {PYTHON}/cmd.py:126", *SCRIPT)).where == "debugger"


def test_import_is_loading() -> None:
    assert is_loading(stack("exec_module <frozen importlib._bootstrap_external>:940", *SCRIPT))
    assert not is_loading(stack(*SCRIPT))


JOIN = stack(*STACKS["waits for a thread"])
TRAINS = stack(*STACKS["a thread that trains"])
LOADS = stack(*STACKS["a thread that loads"])
FEEDS = stack(*STACKS["a DataLoader's feeder"])
IDLES = stack(*STACKS["an idle worker of a pool"])
SUBMITTED = stack(*STACKS["a collective in a pool"])


def test_waiting_main_thread_defers_to_other() -> None:
    assert representative_thread_index([JOIN, LOADS, TRAINS]) == 2
    assert representative_thread_index([JOIN, FEEDS, IDLES, LOADS]) == 3
    assert representative_thread_index([JOIN, FEEDS, IDLES]) == 0
    assert representative_thread_index([JOIN, SUBMITTED]) == 1
    assert representative_thread_index([JOIN, TRAINS], uses_cuda=True) == 0, "nothing shows that it moves"
    assert representative_thread_index([stack(*STACKS["the end of Python"]), TRAINS]) == 1


def test_main_thread_in_an_event_loop() -> None:
    """It may wait for anything: for a thread that trains, or for a server, beside a thread that sends metrics."""
    loop = f"_run_once {PYTHON}/asyncio/base_events.py:1898", f"run {PYTHON}/asyncio/runners.py:118", *SCRIPT
    main = stack(f"_PollLikeSelector.select {PYTHON}/selectors.py:415", *loop)
    assert representative_thread_index([main, LOADS, TRAINS]) == 2
    assert representative_thread_index([main, LOADS]) == 0


def test_working_main_thread_counts() -> None:
    barrier = stack(*STACKS["session.barrier"])
    assert representative_thread_index([stack(*SCRIPT), TRAINS]) == 0
    assert representative_thread_index([barrier, TRAINS]) == 0
    assert representative_thread_index([[], TRAINS]) == 0


def test_short_file_names() -> None:
    assert Frame("f", f"{TORCH}/_tensor.py", 1).portable_file == "torch/_tensor.py"
    assert Frame("f", f"{PYTHON}/threading.py", 1).portable_file == "threading.py"
    assert Frame("f", "/home/me/code/train.py", 1).portable_file == "train.py"
    assert Frame("f", "/src/elasticd/session.py", 1).portable_file == "elasticd/session.py"


def test_place_without_script_frames() -> None:
    assert script_place(stack(f"f {TORCH}/_tensor.py:7")) == "_tensor.py:7 f"


def test_script_that_is_an_installed_package() -> None:
    """Its threads may issue collectives, too; those of other packages serve it."""
    packages = f"{PYTHON}/site-packages"
    train = f"fetch {packages}/trainer/data.py:5", f"<module> {packages}/trainer/__main__.py:9"
    main = stack(f"readinto {PYTHON}/socket.py:720", f"send {packages}/requests/sessions.py:7", *train)
    assert script_place(main) == "data.py:5 fetch"
    assert not only_first_runs_script([main, stack(f"save {packages}/trainer/checkpoint.py:5", *THREAD)])
    assert only_first_runs_script([main, stack(f"send {packages}/metrics/sender.py:5", *THREAD)])
    assert representative_thread_index([stack(f"Thread.join {PYTHON}/threading.py:1119", *train), TRAINS]) == 1


@pytest.mark.parametrize("name", [name for name, what in EXPECTED.items() if what in ("ignored", "counts")])
def test_main_thread_is_alone(name: str) -> None:
    assert only_first_runs_script([stack(*SCRIPT), stack(*STACKS[name])]) is (EXPECTED[name] == "ignored")
    assert only_first_runs_script([stack(*SCRIPT)])
    assert not only_first_runs_script([])

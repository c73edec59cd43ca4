"""The runs that the tests look at: each is made once, when the first test asks for it."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torchrun_parity.launching import Both, Outcome, both, copied, under

FACTS = ("process_facts.py", "torch_facts.py")
QUICKLY = "lasting training compiled loaders"
NO_LOADERS = "compiled loaders"
SCRIPT = Path("ein Ördner", "probe ü.py")
ARGUMENTS = ["--flag", "a b", "ü", "", "--rank=3", "--", "-x"]

Runs = Callable[[str], Both]
"""runs(way): the probe as "script", "thorough", "module", "directory" or, under elasticd only, "cold"."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes")


@pytest.fixture(scope="session")
def site(folder: Path) -> str:
    """A folder for PYTHONPATH in which a user keeps start-up modules."""
    there = copied(folder / "site", "sitecustomize.py")
    shutil.copy(there / "sitecustomize.py", there / "usercustomize.py")
    return str(there)


@pytest.fixture(scope="session")
def runs(folder: Path, site: str) -> Runs:
    made: dict[str, Both] = {}

    def of(way: str) -> Both:
        if way == "cold" and way not in made:
            made[way] = Both(of("script").torchrun, cold(folder, site))
        elif way not in made:
            made[way] = WAYS[way](folder, site)
        return made[way]

    return of


def as_script(folder: Path, site: str) -> Both:
    """Two workers; space and umlaut in the path; the user's own start-up modules."""
    return _script(folder, "as script", {"PYTHONPATH": site, "PROBE_LEAVES_OUT": NO_LOADERS})


def thorough(folder: Path, site: str) -> Both:
    """As the script, with torch.compile, DataLoaders and every way to start a child."""
    return _script(folder, "thorough", {"PYTHONPATH": site})


def _script(folder: Path, name: str, environment: dict[str, str]) -> Both:
    (copied(folder / SCRIPT.parent, "probe.py", *FACTS) / "probe.py").rename(folder / SCRIPT)
    return both(folder / name, 2, [str(SCRIPT), *ARGUMENTS, "last"], folder, environment=environment)


def cold(folder: Path, site: str) -> Outcome:
    """As the script, but an argument keeps elasticd from forking it: to be held against the same torchrun run."""
    (copied(folder / SCRIPT.parent, "probe.py", *FACTS) / "probe.py").rename(folder / SCRIPT)
    command = ["--nproc-per-node", "2", str(SCRIPT), *ARGUMENTS, "${local_rank}"]
    environment = {"PYTHONPATH": site, "PROBE_LEAVES_OUT": QUICKLY}
    return under(folder / "cold", command, folder, environment=environment).outcome()


def as_module(folder: Path, site: str) -> Both:
    """One worker, `-m package`, stdin from a file, and every PYTHON… variable that shows."""
    where = copied(folder / "module", *FACTS)
    package = copied(where / "pkg", "probe.py")
    (package / "probe.py").rename(package / "__main__.py")
    (package / "__init__.py").write_text("")
    environment = {
        "PROBE_LEAVES_OUT": NO_LOADERS,
        "PROBE_READS_STDIN": "1",
        "PYTHONPATH": site,
        "PYTHONIOENCODING": "latin-1:backslashreplace",
        "PYTHONHASHSEED": "12",
        "PYTHONWARNINGS": "ignore::DeprecationWarning",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONINTMAXSTRDIGITS": "5000",
    }
    return both(
        folder / "as module", 1, ["pkg", *ARGUMENTS], where, ("-m",), environment=environment, stdin="a\nlinë\n"
    )


def as_directory(folder: Path, site: str) -> Both:
    """One worker; the script is a folder with a __main__.py; on a terminal."""
    where = copied(folder / "program", "probe.py", *FACTS)
    (where / "probe.py").rename(where / "__main__.py")
    environment = {"PROBE_LEAVES_OUT": QUICKLY, "PYTHONPATH": site, "OMP_NUM_THREADS": "2", "TERM": "dumb"}
    with terminal() as tty:
        return both(folder / "as directory", 1, [str(where)], folder, environment=environment, terminal=tty)


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """A terminal whose output somebody reads."""
    ours, theirs = pty.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has it open any more
            while os.read(ours, 4096):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join(20)
        os.close(ours)


@pytest.fixture(scope="session")
def endings(folder: Path) -> Both:
    """A script that ends in every way there is, one attempt after the other."""
    where = copied(folder / "endings", "ends.py", "torch_facts.py")
    return both(folder / "ends", 1, ["ends.py", "an argument"], where, ("--max-restarts", "6"))


@pytest.fixture(scope="session")
def refused(folder: Path) -> dict[str, Outcome]:
    """Scripts that must not find torch in memory already, under elasticd, by name."""
    copied(folder / "shadowing", "shadowing.py")
    copied(folder / "early", "early.py")
    (folder / "shadowing" / "numpy.py").write_text('WHOSE = "the script\'s"\n')
    names = ("shadowing", "early")
    started = {name: under(folder / f"{name} run", [f"{name}.py"], folder / name) for name in names}
    return {name: launched.outcome() for name, launched in started.items()}


WAYS: dict[str, Callable[[Path, str], Both]] = {
    "script": as_script,
    "thorough": thorough,
    "module": as_module,
    "directory": as_directory,
}

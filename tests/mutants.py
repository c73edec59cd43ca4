"""`make mutants`: inverts one operator at a time in code that unit tests must cover; do they notice?

A mutant is a function with one comparison, condition, sum or choice inverted. This process imports all tests, then
forks: one child records which test reaches which line; then one child for each mutant puts the changed code into the
imported function and runs the tests that reach it, the quick ones first. No file is written. Code outside functions is
not changed, and processes that a test starts run the code as it is.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import msgspec
import pytest
from _pytest.runner import runtestprotocol

from elasticd_agent.system.processes.process import PR_SET_PDEATHSIG, prctl

ROOT = Path(__file__).parents[1]
CHECKPOINTS = ("elasticd/checkpointing/state", "elasticd/checkpointing/storage")
UNIT_TESTS = ("daemon", "hangs", "job", "library", "model", "rendezvous", "scenarios", "telemetry", "torchrun_plugin")
OF_PROCESSES = ("daemon/api", "daemon/cli", "daemon/dashboard", "daemon/runners", "test_session", "test_sharded_memory")
"""In paths of tests that mostly start processes."""
MAX_TEST_S = 5.0
"""Of one that counts as a unit test."""
GOAL = 0.95
ENDLESS_S = 120
"""Of all tests of a mutant: one that loops for ever is ended, and so noticed."""
FAILED = 70
"""The exit status of a fork that raises an error."""
INVERSE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
Lines = set[tuple[str, int]]
Recorded = dict[int, tuple[float, Lines]]
"""By the number of a test: its time in seconds, and the lines that it reaches."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--number", type=int, default=48, help="of mutants in pure modules, and in checkpoints' code")
    parser.add_argument("parts", nargs="*", help="of paths: mutants of these modules only")
    options = parser.parse_args()
    seed = random.randrange(1 << 16) if options.seed is None else options.seed
    kinds = [
        draw(
            [file for file in files if not options.parts or any(part in str(file) for part in options.parts)],
            options.number,
            random.Random(seed),
        )
        for files in (pure_modules(), [file for folder in CHECKPOINTS for file in sorted((ROOT / folder).glob("*.py"))])
    ]
    mutants = [mutant for drawn in kinds for mutant in drawn]
    if not mutants:
        parser.error(f"no pure module and none of checkpoints' code has a part of its path of {options.parts}")
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as out:  # pytest keeps stdout for itself
        out.write(f"seed {seed}: {len(mutants)} mutants\n")
        run = Run(mutants, out.write)
        arguments = ["-qq", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--timeout", "60"]
        if status := pytest.main([*arguments, *tests_of(mutants)], plugins=[run]):
            out.write(f"pytest ends with {status!r}\n")
            return 2
        out.write(table(mutants))
    return 0 if all(sum(mutant.killed for mutant in drawn) >= GOAL * len(drawn) for drawn in kinds) else 1


def pure_modules() -> list[Path]:
    """Those that pyproject.toml's contract keeps free of clocks, I/O and randomness."""
    contracts = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["name"].startswith("Pure modules"))
    return [ROOT / "agents" / (name.replace(".", "/") + ".py") for name in pure["source_modules"]]


@dataclass
class Mutant:
    file: Path
    source: bytes
    """As it is imported, whatever is edited meanwhile."""
    site: int
    """Its place among the sites of its file."""
    first_line: int
    last_line: int
    before: str
    after: str
    killed: bool = False

    def codes(self) -> dict[CodeType, CodeType]:
        """Each function's code as it is, and as it is in this mutant."""
        tree = ast.parse(self.source)
        original = compile(tree, str(self.file), "exec", dont_inherit=True)
        invert(sites(tree)[self.site])
        changed = compile(tree, str(self.file), "exec", dont_inherit=True)
        return dict(zip(_codes(original), _codes(changed), strict=True))

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.first_line}: {self.before} -> {self.after}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def draw(files: Sequence[Path], number: int, rng: random.Random) -> list[Mutant]:
    """`number` of the mutants of these files, or all that there are."""
    found = []
    for file in files:
        source = file.read_bytes()
        for site, node in enumerate(sites(ast.parse(source))):
            changed = copy.deepcopy(node)
            invert(changed)
            # Of a statement, its condition.
            shown = [ast.unparse(n.test if isinstance(n, ast.If) else n) for n in (node, changed)]
            end = node.test if isinstance(node, ast.If) else node
            found.append(Mutant(file, source, site, node.lineno, end.end_lineno or node.lineno, *shown))
    return rng.sample(found, min(number, len(found)))


def sites(tree: ast.AST) -> list[Any]:
    """The nodes in functions that can be inverted."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
    nodes = {
        id(node): node
        for function in functions
        for part in (function.body if isinstance(function.body, list) else [function.body])
        for node in ast.walk(part)
    }
    return [node for node in nodes.values() if _is_site(node)]


def _is_site(node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            return type(node.ops[0]) in INVERSE
        case ast.BinOp(left=left, right=right):
            joins_text = any(isinstance(n, ast.JoinedStr | ast.List | ast.Tuple) or _is_text(n) for n in (left, right))
            return type(node.op) in INVERSE and not joins_text  # a TypeError at once
        case ast.BoolOp() | ast.IfExp() | ast.If() | ast.UnaryOp(op=ast.Not()):
            return True
    return False


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def invert(node: Any) -> None:
    """Changes the node itself."""
    match node:
        case ast.Compare():
            node.ops[0] = INVERSE[type(node.ops[0])]()
        case ast.BoolOp() | ast.BinOp():
            node.op = INVERSE[type(node.op)]()
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.If():
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        case ast.UnaryOp():
            node.operand = ast.copy_location(ast.UnaryOp(ast.Not(), node.operand), node.operand)


def tests_of(mutants: Sequence[Mutant]) -> list[str]:
    """The files of unit tests that import a mutant's module: themselves, or by way of tests and of its neighbours."""
    modules = {_module(mutant.file) for mutant in mutants}
    neighbours = (file for folder in {mutant.file.parent for mutant in mutants} for file in folder.glob("*.py"))
    files = [*(ROOT / "tests").rglob("*.py"), *neighbours]
    imports = {_module(file): _imports(file) for file in files}

    def reached(module: str, seen: set[str]) -> set[str]:
        seen.add(module)
        for name in imports.get(module, set()) - seen:
            reached(name, seen)
        return seen

    return [
        str(file)
        for folder in UNIT_TESTS
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
        if not any(part in str(file) for part in OF_PROCESSES) and reached(_module(file), set()) & modules
    ]


def _module(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removeprefix("agents.")


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@dataclass
class Run:
    """pytest's plug-in: tries each mutant on the tests that pytest has collected."""

    mutants: Sequence[Mutant]
    write: Callable[[str], object]

    def pytest_sessionstart(self) -> None:
        import hypothesis  # by pytest's own plug-in first

        # What a failing property test does next, the search for its smallest example, is of no interest here.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        files = {str(mutant.file) for mutant in self.mutants}
        recorded = _in_child(functools.partial(_record, session.items, files))
        for mutant in self.mutants:
            tests = [session.items[number] for number in _reaching(mutant, recorded)]
            mutant.killed = not _in_child(functools.partial(_survives, mutant, tests))
            if not mutant.killed:
                self.write(f"survives {len(tests)} tests: {mutant}\n")
        return True


def _in_child(function: Callable[[], Any]) -> Any:
    """What the function returns in a fork of this process, or None if the fork dies; RuntimeError for its error."""
    with tempfile.TemporaryFile() as file:
        if (child := os.fork()) == 0:
            status = FAILED
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                pickle.dump(function(), file)
                status = 0
            finally:
                file.write(b"" if status == 0 else traceback.format_exc().encode())
                file.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        if status == FAILED:
            raise RuntimeError(file.read().decode())
        return pickle.load(file) if status == 0 else None


def _record(items: Sequence[pytest.Item], files: set[str]) -> Recorded:
    recorded = {}
    for number, (item, following) in enumerate(zip(items, [*items[1:], None], strict=False)):
        lines: Lines = set()

        def trace(frame: FrameType, event: str, _: object, lines: Lines = lines) -> Callable[..., Any] | None:
            if frame.f_code.co_filename not in files:
                return None
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        reports = runtestprotocol(item, log=False, nextitem=following)
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        spent = sum(report.duration for report in reports)
        if all(report.passed for report in reports) and lines and spent <= MAX_TEST_S:
            recorded[number] = (spent, lines)
    return recorded


def _reaching(mutant: Mutant, recorded: Recorded) -> list[int]:
    """The numbers of the tests that reach it, the quickest first."""
    lines = {(str(mutant.file), line) for line in range(mutant.first_line, mutant.last_line + 1)}
    return [number for _, number in sorted((spent, n) for n, (spent, reached) in recorded.items() if reached & lines)]


def _survives(mutant: Mutant, items: Sequence[pytest.Item]) -> bool:
    signal.alarm(ENDLESS_S)
    codes = mutant.codes()
    gc.unfreeze()  # what pytest has collected, see conftest
    known = [obj for obj in gc.get_objects() if type(obj) is FunctionType]  # isinstance wakes torch's proxies
    functions = [function for function in known if function.__code__.co_filename == str(mutant.file)]
    assert functions, f"{mutant.file} is not imported"
    for function in functions:
        function.__code__ = codes[function.__code__]
    return not any(
        report.failed
        for item, following in zip(items, [*items[1:], None], strict=False)
        for report in runtestprotocol(item, log=False, nextitem=following)
    )


def table(mutants: Sequence[Mutant]) -> str:
    packages = defaultdict(list)
    for mutant in mutants:
        packages[str(mutant.file.parent.relative_to(ROOT))].append(mutant.killed)
    rows = [*sorted(packages.items()), ("total", [mutant.killed for mutant in mutants])]
    lines = [f"{'package':44} mutants  killed  per cent"]
    lines += [f"{name:44} {len(own):7}  {sum(own):6}  {100 * sum(own) / len(own):8.1f}" for name, own in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

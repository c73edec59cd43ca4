"""Composes requests to the owner: command lines, environments, and which modules the template preloads.

Nothing of the job is started here. The script's source is read, not run: a script that sets a variable which torch
reads during its import must not find torch imported already, and starts cold.

Preloading saves a second or more of each restart, and is worth nothing if it changes what the script does. Three rules
keep a warm start equal to a cold one:
- Only numpy, torch, what torch imports lazily in every training job, and the parts of torch and of elasticd that the
  script's top level imports are imported ahead. Modules of the user's project are not: their code may do anything.
- A variable that torch, OpenMP or a BLAS library reads at import, and that the script sets before, makes the job start
  cold (`EarlyEnvironmentScan`), since a library that was imported ahead has read the old value.
- An argument that differs from worker to worker makes it start cold, since the template has one command line.

In doubt a job starts cold, with the reason in one sentence: it costs a second and no correctness.
"""

from __future__ import annotations

import ast
import json
import os
import re
import string
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticd.channel import Message
from elasticd_agent.model.job import EntrypointMode, JobSpec
from elasticd_agent.system.installation import library_file, program
from elasticd_agent.workers.launcher.messages import (
    ColdWorkerFields,
    Execute,
    HoldStates,
    StartTemplate,
    WorkerFields,
)

ALWAYS_PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.profiler._cupti_monitor")
"""numpy, which torch imports where it is installed, torch, and the lazy imports of the first DistributedDataParallel()
and the first optimizer step (torch 2.13)."""
COMPILE_MODULES = ("torch._inductor.compile_fx",)
LAZY_LIBRARY_MODULES = ("elasticd.session", "elasticd.sampler")
"""The lazy imports of `import elasticd`."""
VARIABLES_READ_AT_IMPORT = re.compile(r"(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|NUMEXPR)_|TORCH(?!ELASTIC|_NCCL)|PYTORCH_")
VARIABLES_READ_BY_COMPILER = re.compile(
    r"TORCHINDUCTOR_(?!CACHE_DIR$)|TORCHDYNAMO_|TORCH_(?:COMPILE|DYNAMO)_|AOT_?INDUCTOR_|INDUCTOR_|TRITON_INTERPRET$|CXX$"
)
"""Read when torch._dynamo is imported, which torch itself does later: a script may set them after `import torch`."""
NEVER_PRELOADED = ("torch.utils.cpp_extension",)
"""It reads CUDA_HOME."""
HOOK_PROBE_S = 60.0
"""An interpreter may start a container first."""
MAX_SCANNED_FILES = 500
"""The most files of a script's own modules that are read."""


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """The plan of what to import ahead.

    `modules` in order; those in `required` must be importable; `cold_reason` is the reason not to fork, or None.
    """

    modules: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    cold_reason: str | None = None


def plan_preload(
    script: Path | None, args: tuple[str, ...], required: tuple[str, ...], path: tuple[Path, ...] = ()
) -> PreloadPlan:
    """Return what to import ahead for this script.

    `script` is the file that will run, None if unknown; `path` are folders where it finds modules of its own. A script
    that cannot be read or parsed is no obstacle here: its own traceback explains it.
    """
    if any(substitute_local_rank(arg, 0) != substitute_local_rank(arg, 1) for arg in args):
        return PreloadPlan(cold_reason="an argument holds ${local_rank}, which differs from worker to worker")
    modules = [*ALWAYS_PRELOADED]
    if script is not None:
        try:
            source = read_script(script)
            tree = parse_script(source)
        except (OSError, ValueError, SyntaxError):
            return PreloadPlan(tuple(modules) + required, required)  # the worker's own traceback explains it
        changed = EarlyEnvironmentScan(path).find_early_change(script)
        if changed is not None:
            return PreloadPlan(cold_reason=f"{changed[0]} sets {changed[1]}, which torch reads when it is imported")
        names = list(imported_modules(tree))
        known = (*modules, *NEVER_PRELOADED)
        modules += [name for name in names if name.startswith("torch.") and name not in known]
        if any(name.partition(".")[0] == "elasticd" for name in names):
            modules += LAZY_LIBRARY_MODULES
        if "torch.compile" in source or ".compile(" in source:
            modules += COMPILE_MODULES
    return PreloadPlan(tuple(modules) + required, required)


def substitute_local_rank(arg: str, local_rank: int) -> str:
    """An argument of the script for one worker, as torchrun makes it: "$$" is "$"."""
    return string.Template(arg).safe_substitute(local_rank=local_rank)


def read_script(path: Path) -> str:
    """The source as Python reads it, with a byte-order mark or an encoding of its own. Raises OSError, SyntaxError and
    ValueError.
    """
    with tokenize.open(path) as file:
        return file.read()


def parse_script(source: str) -> ast.Module:
    """The syntax tree; the workers' own interpreter prints its warnings. Raises SyntaxError and ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except RecursionError as error:
            raise SyntaxError(str(error)) from None


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """The modules that the script's top level imports by name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


class EarlyEnvironmentScan:
    """Finds a relevant variable that is set before torch is imported (or, without such an import, anywhere), or before
    its compiler is, which may be at any time.

    Statements are read from top to bottom, and with an import of a module in `path` that module's; once torch is
    imported only if it has something to do with the environment.
    """

    def __init__(self, path: tuple[Path, ...]) -> None:
        self._path = path
        self._read: set[Path] = set()
        self._torch = False

    def find_early_change(self, file: Path) -> tuple[str, str] | None:
        """The name of the file, and of the variable."""
        self._read.add(file)
        try:
            source = read_script(file)
            if self._torch and "environ" not in source:
                return None
            tree = parse_script(source)
        except (OSError, ValueError, SyntaxError):
            return None
        nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        for node in sorted(nodes, key=lambda node: node.lineno):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                change = self._change_in_import(node, file)
            else:
                names = [name for name in _variables_set_by(node) if self._is_read_later(name)]
                change = (file.name, names[0]) if names else None
            if change is not None:
                return change
        return None

    def _is_read_later(self, name: str) -> bool:
        at_import = not self._torch and VARIABLES_READ_AT_IMPORT.match(name) is not None
        return at_import or VARIABLES_READ_BY_COMPILER.match(name) is not None

    def _change_in_import(self, node: ast.Import | ast.ImportFrom, file: Path) -> tuple[str, str] | None:
        self._torch = self._torch or _imports_torch(node)
        for module in self._imported_files(node, file):
            change = self.find_early_change(module)
            if change is not None:
                return change
        return None

    def _imported_files(self, node: ast.Import | ast.ImportFrom, file: Path) -> Iterator[Path]:
        """The files that an import statement runs, outermost package first, each once."""
        if isinstance(node, ast.Import):
            names, folders = [alias.name for alias in node.names], self._path
        else:
            names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
            folders = (file.parents[node.level - 1],) if 0 < node.level <= len(file.parents) else self._path
        for name in names:
            parts = name.split(".")
            for folder in folders:
                bases = [folder.joinpath(*parts[: i + 1]) for i in range(len(parts))]
                for path in (p for base in bases for p in (base / "__init__.py", base.with_suffix(".py"))):
                    if path not in self._read and len(self._read) < MAX_SCANNED_FILES and path.is_file():
                        yield path


def _imports_torch(node: ast.Import | ast.ImportFrom) -> bool:
    """True if the statement imports torch or a part of it."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(name == "torch" or name.startswith("torch.") for name in names)


def _variables_set_by(node: ast.AST) -> Iterator[str]:
    """Constant names that a statement or call writes into os.environ."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _constant_strings([target.slice])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "putenv" or (_is_environ(node.func.value) and node.func.attr in ("setdefault", "pop")):
            yield from _constant_strings(node.args[:1])
        elif _is_environ(node.func.value) and node.func.attr == "update":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
            yield from _constant_strings(
                [key for arg in node.args if isinstance(arg, ast.Dict) for key in arg.keys if key]
            )


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _constant_strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def worker_base_environment(environ: Mapping[str, str], workers: int) -> dict[str, str]:
    """The environment of all workers. Several workers get one OpenMP thread each by default, as under torchrun."""
    # The store's credentials stay with the agents: scripts print their environment.
    env = {name: value for name, value in environ.items() if not name.startswith(("ELASTICD_LAUNCH", "ELASTICD_ETCD"))}
    if workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return env


def find_script(module: bool, entrypoint: str, cwd: Path, python_path: Iterable[Path] = ()) -> Path | None:
    """The file that will run: the script, that of its directory, or the module that `python -m` finds first in `cwd`
    and `python_path`; None if unknown.
    """
    if not module:
        script = cwd / entrypoint
        return script / "__main__.py" if script.is_dir() else script
    bases = [folder.joinpath(*entrypoint.split(".")) for folder in (cwd, *python_path)]
    files = (path for base in bases for path in (base.with_suffix(".py"), base / "__main__.py"))
    return next((path for path in files if path.is_file()), None)


INTEGRATED_MODULES = (
    *("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
    "accelerate.accelerator",
)
"""The modules after which --integrate adds a callback."""
TEMPLATE_PROGRAMS = ("template", "tcp_store", "hidden_modules", "debug_hooks", "console_streams", "cpu_binding")
LIBRARY_MODULES = (
    "elasticd.memory_order",
    "elasticd.channel",
    "elasticd.errors",
    "elasticd.heartbeat.exit_report",
    "elasticd.heartbeat.record",
    "elasticd.heartbeat.worker_events",
    "elasticd.heartbeat.collectives",
    "elasticd.heartbeat.optimizer_hook",
    "elasticd.heartbeat.main_thread",
    "elasticd.heartbeat.recorders",
    "elasticd.heartbeat.thread",
)
"""Modules of the library that every worker loads by path, each after those that it imports."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to start; `env` is its difference from the job's base environment."""

    env: dict[str, str]
    stdout: str | None
    stderr: str | None
    heartbeat_file: str
    cpus: tuple[int, ...] = ()  #: none: as the agent

    def fields(self) -> WorkerFields:
        return {"env": self.env, "stdout": self.stdout, "stderr": self.stderr, "cpus": self.cpus}


class LaunchRequests:
    """Composes one job's requests."""

    def __init__(self, spec: JobSpec, base_env: dict[str, str], preload: PreloadPlan) -> None:
        self._spec = spec
        self._preload = preload
        self._base_env = {**base_env, "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals)}

    def hook_runs(self) -> bool:
        """True if the job's interpreter runs the start-up hook. One that is a script around another may not pass
        PYTHONPATH on, or not see the files: its template would run the script."""
        launch = json.dumps(self._launch_config(mode="probe"))
        env = {**self._base_env, "PYTHONPATH": self._python_path_with_hook(), "ELASTICD_LAUNCH": launch}
        try:
            probe = subprocess.run(
                [self._spec.python, "-u", "-c", "raise SystemExit(1)"],
                env=env,
                cwd=self._spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=HOOK_PROBE_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return probe.returncode == 0

    def writer_request(self) -> HoldStates:
        return HoldStates([sys.executable, "-I", library_file("elasticd.checkpointing.memory.writer")], self._base_env)

    def leave_out(self, left_out: Collection[str]) -> None:
        """Preload all but these from now on."""
        modules, required = (
            tuple(name for name in names if name not in left_out)
            for names in (self._preload.modules, self._preload.required)
        )
        self._preload = replace(self._preload, modules=modules, required=required)

    def template_request(self) -> StartTemplate:
        """Return the request to start the template: the script's command line and paths, and what to import."""
        spec = self._spec
        script = None if spec.mode is EntrypointMode.MODULE else find_script(False, spec.entrypoint, spec.cwd)
        launch = self._launch_config(
            mode="template",
            preload=self._preload.modules,
            required=self._preload.required,
            script_dir=str(spec.cwd if script is None else script.resolve().parent),
        )
        env = {**self._base_env, "PYTHONPATH": self._python_path_with_hook()}
        return StartTemplate(self._command_line(0), env, str(spec.cwd), launch)

    def cold_start_request(
        self, group: int, workers: tuple[WorkerSpec, ...], host: str, port: int, *, store: bool, keep: bool
    ) -> Execute:
        """Return the request to start workers without a template."""
        spec = self._spec

        def hook(worker: WorkerSpec) -> dict[str, str]:
            if spec.mode is EntrypointMode.EXEC:
                return {}
            logs = [fd for path, fd in ((worker.stdout, 1), (worker.stderr, 2)) if path is not None]
            launch = json.dumps(self._launch_config(mode="cold", logs=logs))
            return {"PYTHONPATH": self._python_path_with_hook(), "ELASTICD_LAUNCH": launch}

        store_program = {"argv": [spec.python, "-u", program("tcp_store")]} if store else None
        argv, workers_env = self._command_line(0), hook(workers[0])
        started: list[ColdWorkerFields] = [
            {
                **worker.fields(),
                "argv": None if (own := self._command_line(rank)) == argv else own,
                "env": {**({} if (launch := hook(worker)) == workers_env else launch), **worker.env},
            }
            for rank, worker in enumerate(workers)
        ]
        env = self._base_env
        return Execute(group, store_program, keep, host, port, str(spec.cwd), env, argv, workers_env, started)

    def _command_line(self, local_rank: int) -> list[str]:
        spec = self._spec
        args = [substitute_local_rank(arg, local_rank) for arg in spec.args]
        if spec.mode is EntrypointMode.EXEC:
            return [spec.entrypoint, *args]
        return [spec.python, "-u", *(["-m"] if spec.mode is EntrypointMode.MODULE else []), spec.entrypoint, *args]

    def _launch_config(self, **launch: Any) -> Message:
        """The start-up hook's configuration; `agent` and its descendants may trace the workers."""
        files = {name: program(name) for name in TEMPLATE_PROGRAMS}
        ours = {"library": {name: library_file(name) for name in LIBRARY_MODULES}, "agent": os.getpid()}
        ours |= {
            "read_at_import": VARIABLES_READ_AT_IMPORT.pattern,
            "read_by_compiler": VARIABLES_READ_BY_COMPILER.pattern,
            "integrate": INTEGRATED_MODULES if self._spec.integrate else (),
        }
        return {**files, **ours, "pythonpath": self._base_env.get("PYTHONPATH"), **launch}

    def _python_path_with_hook(self) -> str:
        """A PYTHONPATH on which the interpreter finds our start-up hook first."""
        return os.pathsep.join(filter(None, [program("start_up_hook"), self._base_env.get("PYTHONPATH")]))

"""Pure: the stack of a thread -> where it is: a collective, a device wait, an init, a barrier of elasticd, elsewhere.

This tells a rank that waits from the one it waits for. A stack is read from its innermost call outwards, through frames
of torch and Python, to the first one in the table. The first frame of other code ends the search: a thread that runs
the script's own code is elsewhere. A rule names the file, too: a script may use the same function names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticd_agent.hangs.stacks import PACKAGES_PATTERN, RUNTIME_LIBRARIES, STDLIB_PATTERN, Frame, script_library
from elasticd_agent.model.reports import StackPlace


@dataclass(frozen=True, slots=True)
class FactsBesideStack:
    """Facts that a stack does not show."""

    idle: bool = False  #: the thread uses no processor
    has_process_group: bool = False  #: there is a process group
    uses_cuda: bool = False
    holds_gil: bool = False  #: the thread has the GIL
    source_line: str = ""  #: the innermost frame's line of source, for methods written in C have no frame


@dataclass(frozen=True, slots=True)
class StackLocation:
    """`function` is for people: "all_reduce", or for elsewhere the script's own "train.py:88 next_batch"."""

    where: StackPlace
    function: str


_ELASTICD_FILES = r"(?:^|/)(?:elasticd_(?:agent|daemon)/|elasticd/[\w/]+\.py$)"


@dataclass(frozen=True, slots=True)
class _Rule:
    where: StackPlace
    file_pattern: re.Pattern[str]
    function_pattern: re.Pattern[str]
    label: str = ""


def _rule(where: StackPlace, file: str, name: str = r".*", label: str = "") -> _Rule:
    return _Rule(where, re.compile(rf"(?:^|/){file}$"), re.compile(name), label)


_C10D_FILE = r"torch/distributed/distributed_c10d\.py"
_RULES = (
    # Pickling before a collective is work, and so is compiling, which may wait for processes that compile.
    _rule("elsewhere", _C10D_FILE, r"_object_to_tensor|_tensor_to_object"),
    _rule("elsewhere", r"torch/_inductor/(?!output_code|utils).*"),
    _rule("elsewhere", r"torch/_dynamo/(?!eval_frame|external_utils).*"),
    _rule("elsewhere", r"torch/fx/.*"),
    _rule("elsewhere", r"torch/utils/data/.*"),
    _rule(
        "init", _C10D_FILE, r"init_process_group|_store_based_barrier|_?new_(?:sub)?groups?\w*|split_group|shrink_group"
    ),
    _rule("init", _C10D_FILE, r"_new_process_group_helper|_create_process_group_wrapper"),
    _rule("init", r"torch/distributed/rendezvous\.py", r".*", "rendezvous"),
    _rule("init", r"torch/distributed/elastic/(?:rendezvous|utils/store|utils/distributed).*", r".*", "rendezvous"),
    _rule("collective", _C10D_FILE, r"destroy_process_group|_abort_process_group", "destroy_process_group"),
    _rule("collective", _C10D_FILE, r"_coalescing_manager|__exit__", "a coalesced collective"),
    _rule(
        "collective",
        _C10D_FILE,
        r"_?(?:all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|i?send|i?recv|batch_isend|wait)\w*",
    ),
    _rule("collective", r"torch/distributed/_functional_collectives\w*\.py", r".*", "a functional collective"),
    _rule("collective", r"torch/distributed/_symmetric_memory/.*"),
    _rule("collective", r"torch/nn/parallel/distributed\.py", r"_\w*(?:sync|broadcast)\w*|_pre_forward", "DDP.forward"),
    _rule(
        "collective",
        r"torch/distributed/utils\.py",
        r"_verify_param_shape_across_processes|_sync_module_states|_sync_params_and_buffers",
        "DDP.__init__",
    ),
    _rule("collective", r"torch/nn/parallel/distributed\.py", r"__init__|_ddp_init_helper", "DDP.__init__"),
    _rule("device", r"torch/(?:cuda|accelerator|xpu)/.*", r"synchronize|wait(?:_event|_stream)?|elapsed_time"),
    _rule("device", r"torch/cuda/memory\.py", r"empty_cache|memory_stats\w*"),
    _rule("device", r"torch/nn/modules/module\.py", r"convert", "Module.to"),
    _rule(
        "init",
        r"elasticd/(?:coordination/store_channel|process_group)\.py",
        r"open_channel|_agree_on_token|join\w*",
        "elasticd.init",
    ),
    _rule("barrier", r"elasticd/coordination/barrier\.py", r".*", "session.barrier"),
    _rule("barrier", r"elasticd/coordination/(?:store_channel|decisions|pause|rank_status)\.py", r".*", "session"),
    # A rank that writes or reads a checkpoint inside of a wait of the others is at work.
    _rule("elsewhere", r"elasticd/(?!session|heartbeat/(?:optimizer_hook|thread))[\w/]+\.py"),
)

_BACKWARD_RULE = _rule("collective", r"torch/autograd/graph\.py", r"_engine_run_backward", "backward")

_WAIT_CALL = re.compile(r"((?:\w+\.)*\w+|)(?<!\bos)\.wait\(")
_DEVICE_CALL = re.compile(
    r"\.(?:item|tolist|cpu|numpy|cuda|to|nonzero|synchronize)\(|\b(?:float|bool)\(|torch\.(?:unique|nonzero)\("
)

_PYTHON_WAIT_FILES = re.compile(
    rf"{STDLIB_PATTERN}(?:threading|queue|selectors|concurrent/futures/_base|multiprocessing/(?:connection|queues|synchronize)"
    r"|asyncio/(?:base_events|runners))\.py$"
)
"""Python's own waits, for another thread or process, or, in an event loop, for anything."""
_EVENT_LOOP_FILES = re.compile(rf"{STDLIB_PATTERN}asyncio/")
_DEBUGGER_FILES = re.compile(
    rf"{STDLIB_PATTERN}(?:pdb|bdb|cmd|code)\.py$|{PACKAGES_PATTERN}(?:IPython|ipdb|pudb|pdbpp)/"
    r"|/(?:debugpy|_?pydevd\w*)(?:/|\.py$)"
)
"""VS Code and PyCharm bring debugpy and pydevd with them, outside of any site-packages."""
_PROMPT_FUNCTIONS = (
    "interaction",
    "cmdloop",
    "interact",
    "raw_input",
    "mainloop",
    "do_wait_suspend",
    "_do_wait_suspend",
    "wait_for_client",
)
"""The debuggers' functions that wait for a person."""
_IMPORT_FILES = re.compile(rf"<frozen importlib|{STDLIB_PATTERN}(?:importlib|ctypes)/")
_SERVICE_THREAD_FILES = re.compile(
    rf"{STDLIB_PATTERN}(?:concurrent/futures|multiprocessing|socketserver)\b|{PACKAGES_PATTERN}(?:torch/utils/data|torch/_inductor|tqdm"
    rf"|prometheus_client|tensorboard|wandb)/|{_ELASTICD_FILES}"
)
"""Threads that serve other ones: they wait for work most of the time, which says nothing about the training."""
_WORK_QUEUE_FILES = re.compile(rf"{STDLIB_PATTERN}(?:concurrent/futures/thread|multiprocessing/queues)\.py$")
"""Python's threads that only do what another thread of the process gives them."""


def locate(frames: Sequence[Frame], beside: FactsBesideStack = FactsBesideStack()) -> StackLocation:
    """The place of the thread with these frames, innermost first. No frames: it runs no Python code."""
    if not frames:
        return StackLocation("elsewhere", "")
    if any(_DEBUGGER_FILES.search(frame.file) and frame.bare_name in _PROMPT_FUNCTIONS for frame in frames):
        return StackLocation("debugger", script_place(frames))
    for frame in frames:
        if _matches(_BACKWARD_RULE, frame):
            # Waits for collectives and all work look the same here.
            inside = beside.idle and beside.has_process_group
            return (
                StackLocation("collective", _BACKWARD_RULE.label)
                if inside
                else StackLocation("elsewhere", script_place(frames))
            )
        rule = next((rule for rule in _RULES if _matches(rule, frame)), None)
        if rule is not None:
            named = rule.label or _outermost_in_file(frames, frame)
            return StackLocation(rule.where, script_place(frames) if rule.where == "elsewhere" else named)
        if frame.library not in RUNTIME_LIBRARIES:
            break
    return _locate_by_source(frames, beside) or StackLocation("elsewhere", script_place(frames))


def representative_thread_index(threads: Sequence[Sequence[Frame]], uses_cuda: bool = False) -> int:
    """The index of the thread whose stack says what the rank does; the main one is first.

    That is the main thread, unless it waits for another thread or has ended: a script may train in another one. One in
    an event loop may wait for anything, so only a thread that waits for other ranks says more. With a GPU the waiting
    main thread counts: neither bytes nor its place show that another one moves, as in an evaluation. NCCL's recorder
    has what devices wait in.
    """
    main = threads[0]
    caller = _caller_of_wait(main)
    if not main or caller is main[0]:
        return 0
    if caller is not None and (uses_cuda or caller.library != script_library(main)):
        return 0
    candidates = [i for i, frames in enumerate(threads) if i and not _serves_other_threads(frames)]
    waiting = [
        i
        for i in candidates
        if locate(threads[i], FactsBesideStack(idle=True, has_process_group=True)).where != "elsewhere"
    ]
    in_loop = any(_EVENT_LOOP_FILES.search(frame.file) for frame in main)
    return next(iter(waiting or ([] if in_loop else candidates)), 0)


def only_first_runs_script(threads: Sequence[Sequence[Frame]]) -> bool:
    """No thread but the first one runs code of the script, which could end the wait of this rank or of others.

    Nor will one: a timer, an event loop or a pool's result handler has frames of Python only until it calls the script.
    torch's own threads may issue collectives, too: one that saves a distributed checkpoint in the background does. The
    script may be an installed package, so the packages that the first thread runs count as the script's code.
    """
    if not threads:
        return False
    script_packages = {frame.library for frame in threads[0]}.difference(RUNTIME_LIBRARIES)
    return all(_never_calls_script(frames, script_packages) for frames in threads[1:])


def is_loading(frames: Sequence[Frame]) -> bool:
    """It imports a module, or loads a library."""
    return any(_IMPORT_FILES.search(frame.file) is not None for frame in frames)


def _never_calls_script(frames: Sequence[Frame], script_packages: Collection[str]) -> bool:
    libraries = {frame.library for frame in frames}
    if any(frame.path_in_library.startswith("torch/distributed/") for frame in frames):
        return False
    return libraries.isdisjoint({"", *script_packages}) and (
        libraries != {"python"} or any(_WORK_QUEUE_FILES.search(frame.file) for frame in frames)
    )


def script_place(frames: Sequence[Frame]) -> str:
    """The innermost frame of the script's own code, or else the innermost one, as "train.py:88 next_batch"."""
    frame = _script_frame(frames)
    return f"{frame.basename_and_line} {frame.bare_name}"


def script_function(frames: Sequence[Frame]) -> str:
    """The same without the line, which changes while a script polls: "train.py next_batch". "" without frames."""
    if not frames:
        return ""
    frame = _script_frame(frames)
    return f"{frame.basename_and_line.partition(':')[0]} {frame.bare_name}"


def _script_frame(frames: Sequence[Frame]) -> Frame:
    script = script_library(frames)
    return next((frame for frame in frames if frame.library == script), frames[0])


def _matches(rule: _Rule, frame: Frame) -> bool:
    return (
        rule.file_pattern.search(frame.file) is not None
        and rule.function_pattern.fullmatch(frame.bare_name) is not None
    )


def _outermost_in_file(frames: Sequence[Frame], at: Frame) -> str:
    """The outermost of functions of one file that call each other: the one that the script called."""
    name = at.bare_name
    for frame in frames[frames.index(at) :]:
        if frame.file == at.file:
            name = frame.bare_name
        elif not frame.file.endswith("c10d_logger.py"):
            break
    return name


def _caller_of_wait(frames: Sequence[Frame]) -> Frame | None:
    """The caller of Python's own wait functions."""
    return next((frame for frame in frames if not _PYTHON_WAIT_FILES.search(frame.file)), None)


def _serves_other_threads(frames: Sequence[Frame]) -> bool:
    caller = _caller_of_wait(frames)
    return caller is None or _SERVICE_THREAD_FILES.search(caller.file) is not None


def _locate_by_source(frames: Sequence[Frame], beside: FactsBesideStack) -> StackLocation | None:
    """A method written in C, by the line that calls it: a thread that waits in one has released the GIL.

    Whose `wait` that is cannot be told: a collective's, a store's. The name tells it from what torch's frames say.
    """
    if not beside.source_line or beside.holds_gil:
        return None
    call = _WAIT_CALL.search(beside.source_line) if beside.has_process_group else None
    if call and beside.idle:
        return StackLocation("collective", f"{call[1] or 'object'}.wait")
    if beside.uses_cuda and (call or _DEVICE_CALL.search(beside.source_line)):
        return StackLocation("device", script_place(frames))
    return None

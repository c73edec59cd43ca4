"""The template: the job's own interpreter, paused before the script, with torch in memory.

It runs as `python -u script.py args…` with a start-up hook (hook/sitecustomize.py), imports what the job
preloads, and then serves fork requests of the owner. A forked worker returns from the hook, and the interpreter runs
the script. So `__main__`, pickling, multiprocessing, tracebacks, exit codes and /proc are those of a run without us.

**Invariant.** A worker is what a fresh interpreter would be, except that its imports are fast. What a fork would carry
over is kept out of the template, or put right in the worker:

    threads         a lock that another thread holds at a fork is never released in the child. There is one thread at
                    every fork: libraries are told to start none, and `why_unfit` counts them before each fork
    accelerators    a driver's state does not survive a fork. No device file is open (`why_unfit`), NVML is shut down
                    after torch has counted devices by it, and a child is asked whether torch would refuse CUDA
                    (`why_bad_fork`)
    modules         a script must not notice that torch is loaded: `hidden_modules` keeps modules, and the side
                    effects of their imports, from sight until the script imports them
    environment     a worker gets the job's own, and what the script sets before it imports torch takes effect then
                    (`apply_environment_changes`), or a message says that it is too late
    random numbers  generators that a fork would share are seeded anew (`reseed_generators`)
    the user's code is never run here. An exception that left this module would make the interpreter run the script in
                    the template, so every way out of it is `os._exit`

A module that breaks a rule is left out by name, and another template preloads the rest: one bad module costs its own
import, not the warm start. Only what torch itself breaks makes workers start cold, with the reason.

A worker has the owner as its parent, not the template, so that its exit status outlives both. Therefore the template
forks an intermediate process, which forks the workers, reports their pids and exits; the owner, a child subreaper,
adopts them. Each worker waits for that (`await_adoption`) before it asks to die with its parent, and then for its
release: groups are forked ahead, and wait parked until a round needs them. A parked worker that reads end of file
exits. The socket of the release stays open: `session.run` of the library parks a worker again, and it waits for another
release.

In a cold start (`"mode": "cold"`) the hook only installs the worker's heartbeat and returns. A probe (`"mode":
"probe"`) shows that it runs at all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME = 1, 15, 16
ADOPTION_DEADLINE_S = 10.0
THREAD_EXIT_S = 0.5
"""A thread that was joined is in /proc for a moment."""
THREAD_COUNT_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""torch takes the first one that has a number."""
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
MAX_NVML_SHUTDOWNS = 64

LaunchConfig = dict[str, Any]


def main(config: LaunchConfig) -> None:
    """Returns in a worker, when the script may run; a template never returns."""
    console = load_module_file("_elasticd_console", config["console_streams"])
    console.survive_closed_console()
    console.shorten_interrupts()
    library = load_library(config["library"])
    if config["mode"] == "probe":
        os._exit(0)
    if config["mode"] == "cold":
        console.survive_closed_console(config["logs"], full_disk_reporter(library))
        if "ELASTICD_HEARTBEAT" in os.environ:
            after_import("torch.optim.optimizer", start_heartbeat(config, library))
        for name in config["integrate"]:
            after_import(name, integrate)
        return
    Template(config, library, console).serve()


def full_disk_reporter(library: dict[str, ModuleType]) -> Callable[[OSError], None]:
    """A function that says, once in a round, that output is lost."""
    told: set[str] = set()

    def report(error: OSError) -> None:
        number, rank = os.environ.get("ELASTICD_ROUND", "0"), os.environ.get("RANK", "0")
        if number not in told:
            told.add(number)
            lost = f"rank {rank}'s log cannot be written ({error.strerror}): its output is lost until there is room"
            library["elasticd.heartbeat.worker_events"].from_environment(int(number), int(rank)).write("message", lost)

    return report


def load_module_file(name: str, path: str) -> ModuleType:
    """Load one of our files by path: elasticd need not be installed in the job's interpreter."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up during its execution
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def load_library(paths: dict[str, str]) -> dict[str, ModuleType]:
    """The library's files for every worker, by name, each after those that it imports."""
    before = {name: sys.modules.pop(name) for name in paths if name in sys.modules}
    library: dict[str, ModuleType] = {}
    try:
        for name, path in paths.items():
            sys.modules[name] = library[name] = load_module_file(name, path)
    finally:
        for name in paths:
            sys.modules.pop(name, None)
        sys.modules.update(before)
    return library


class Template:
    """Preloads, hides the loaded modules, and forks on request until the owner ends."""

    def __init__(self, config: LaunchConfig, library: dict[str, ModuleType], console: ModuleType) -> None:
        self.config = config
        self.library = library
        self.console = console
        self.control = socket.socket(fileno=config["fd"])
        self.channel = library["elasticd.channel"]
        self.channel.allow_large_messages(self.control)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.comm = ctypes.create_string_buffer(16)
        self.libc.prctl(PR_GET_NAME, self.comm, 0, 0, 0)
        self.env = dict(os.environ)
        self.signal_handlers: dict[int, Any] = {}
        self.store = load_module_file("_elasticd_store", config["tcp_store"])
        self.nvml_users: dict[str, int] = {}
        self.hidden = load_module_file("_elasticd_hidden", config["hidden_modules"]).HiddenModules()

    def serve(self) -> None:
        """Returns only in a released worker."""
        try:
            release = self.wait_for_release()
        except BaseException:  # noqa: BLE001 site.py would print it and run the script here
            traceback.print_exc()
            os._exit(1)
        self.become_worker(release)

    def wait_for_release(self) -> LaunchConfig:
        """Preload, then fork on request. Returns a worker's release, in that worker."""
        os.set_inheritable(self.control.fileno(), False)
        self.libc.prctl(PR_SET_NAME, b"elasticd-templ", 0, 0, 0)
        for number in self.config[
            "signals"
        ]:  # a batch system signals every process of a job, also one that is importing
            before = signal.getsignal(number)
            if before in (signal.SIG_IGN, None) or (before is signal.SIG_DFL and self.signal_handler_address(number)):
                continue
            # A handler: an ignored signal would stay ignored in processes that imports start.
            signal.signal(number, ignore_signal)
            self.signal_handlers[number] = before, self.signal_handler_address(number)
        started = time.monotonic()
        try:
            left_out = self.preload()
        except BaseException as error:  # noqa: BLE001 an import may raise anything; the cold start shows it
            self.send("TemplateReady", cold=f"preloading failed: {type(error).__name__}: {error}", seconds=0.0)
            os._exit(0)
        cold = self.why_unfit() or self.why_bad_fork()
        if cold is not None and not left_out:
            left_out = dict.fromkeys(self.config["required"], cold)
        if left_out:
            self.send("TemplateUnfit", leave_out=left_out)
            os._exit(0)
        gc.collect()  # of the user's modules: what torch left is frozen already
        gc.freeze()  # garbage collection in the workers then leaves the shared pages untouched
        if any(type(cls).__module__ == "nanobind" for cls in object.__subclasses__()):
            atexit.register(self.end_as_usual)
        self.send("TemplateReady", cold=cold or self.find_shadowing_file(), seconds=time.monotonic() - started)
        while True:
            request, fds = self.channel.receive_with_descriptors(self.control)
            if request is None:
                os._exit(0)
            released = self.fork(request, [socket.socket(fileno=fd) for fd in fds])
            if released is not None:
                return released

    def end_as_usual(self) -> None:
        """Let Python free all modules as it ends: nanobind prints what is left of its own (triton's) as leaked."""
        self.hidden.put_back_all()
        gc.unfreeze()

    def send(self, kind: str, **fields: Any) -> None:
        try:
            self.channel.send(self.control, {"type": kind, **fields})
        except OSError:
            os._exit(0)  # the owner was killed; after an exception the script would run here

    def preload(self) -> dict[str, str]:
        """Import the job's modules, recording what each statement loaded.

        Returns the modules that make this process unfit, each with the reason: another template preloads the others.
        """
        self.baseline = set(sys.modules)
        left_out: dict[str, str] = {}
        with self.forkable_environment():
            for name in self.config["preload"]:
                self.send("Preloading", module=name)
                before = self.why_unfit()
                try:
                    with self.hidden.recording_import_of(name), self.without_garbage_collection(name):
                        importlib.import_module(name)
                except BaseException as error:
                    if name == "torch":  # any other module can be left out
                        raise
                    missing = isinstance(error, ModuleNotFoundError) and name.startswith(error.name or "?")
                    if name in self.config["required"] or not missing:  # or this version of torch does not have it
                        left_out[name] = f"it failed: {type(error).__name__}: {error}"
                    continue
                why = self.why_unfit()
                if why == before and name in self.config["required"] and not left_out:
                    why = self.why_bad_fork()
                if why is not None and why != before and name != "torch":
                    left_out[name] = why
        distributed = self.hidden.get_loaded("torch.distributed")
        self.tcp_store = getattr(distributed, "TCPStore", None)
        self.hidden.hide_all()
        return left_out

    def find_shadowing_file(self) -> str | None:
        """A file of the script's directory, which comes first on its path, with the name of a preloaded module."""
        directory = self.config["script_dir"]
        loaded = {name.partition(".")[0] for name in set(sys.modules) - self.baseline} | self.hidden.hidden_packages()
        try:
            entries = os.listdir(directory)
        except OSError:  # of a directory that may be entered only: Python finds no module there either
            return None
        for entry in entries:
            name = entry.partition(".")[0]
            path = os.path.join(directory, entry)
            if name in loaded and (entry.endswith((".py", ".so")) or os.path.isfile(os.path.join(path, "__init__.py"))):
                return f"{path} shadows a module that is preloaded"
        return None

    @contextlib.contextmanager
    def forkable_environment(self) -> Iterator[None]:
        """Variables under which imports leave a process that can be forked; a worker gets its own environment back.

        OpenBLAS starts its threads when numpy loads it; in a worker, importing numpy starts the usual number. torch can
        count GPUs by NVML instead of the CUDA driver, which does not survive a fork.
        """
        os.environ.update(OPENBLAS_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(self.env)

    @contextlib.contextmanager
    def without_garbage_collection(self, name: str) -> Iterator[None]:
        """Import without garbage collection, as Python's documentation advises before a fork: it would take a quarter
        of torch's import, and what it frees leaves holes that workers write into. The user's own modules are imported
        with it, since they may turn it off.
        """
        collects = gc.isenabled() and name not in self.config["required"]
        if collects:
            gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.freeze()
                gc.enable()

    def why_unfit(self) -> str | None:
        """Why this process must not be forked, or None."""
        deadline = time.monotonic() + THREAD_EXIT_S
        while (threads := len(os.listdir("/proc/self/task"))) != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        if threads != 1:
            return f"preloading left {threads} threads: forking them could dead-lock"
        if find_open_device() is not None:
            self.shut_nvml_down()
        device = find_open_device()
        if device is not None:
            return f"preloading opened {device}: an accelerator's driver does not survive a fork"
        return None

    def shut_nvml_down(self) -> None:
        """Close what NVML has open. torch, asked whether there is a GPU, leaves it initialised; every call of torch's
        initialises it again. CUDA's own driver keeps its devices open, and cannot be forked.
        """
        for path in mapped_libraries("libnvidia-ml"):
            nvml = ctypes.CDLL(path)
            while self.nvml_users.get(path, 0) < MAX_NVML_SHUTDOWNS and nvml.nvmlShutdown() == 0:
                self.nvml_users[path] = self.nvml_users.get(path, 0) + 1

    def restore_nvml(self) -> None:
        """A preloaded module that uses pynvml finds it in a worker as it left it."""
        if self.hidden.get_loaded("pynvml") is not None:
            for path, users in self.nvml_users.items():
                for _ in range(users):
                    ctypes.CDLL(path).nvmlInit_v2()

    def why_bad_fork(self) -> str | None:
        """torch refuses CUDA to the children of a process that has initialised it, whatever that has open: ask in a
        child."""
        cuda: Any = getattr(self.hidden.get_loaded("torch"), "cuda", None)
        if not hasattr(cuda, "_is_in_bad_fork"):
            return None
        child = os.fork()
        if not child:
            try:
                os._exit(bool(cuda._is_in_bad_fork()))
            finally:
                os._exit(2)  # after an exception the script would run here
        _, status = os.waitpid(child, 0)
        return "preloading initialised CUDA, which does not survive a fork" if status else None

    # --- forking ------------------------------------------------------------------------------------------------

    def fork(self, request: LaunchConfig, channels: list[socket.socket]) -> LaunchConfig | None:
        """Fork a store, if requested, and workers through an intermediate; None in the template, the release in a
        worker."""
        unfit = self.why_unfit()
        if unfit is not None:
            self.send("Refused", group=request["fork"], why=unfit)
            if self.config["required"]:  # one of them has started a thread since
                self.send("TemplateUnfit", leave_out=dict.fromkeys(self.config["required"], unfit))
                os._exit(0)
            return None
        try:
            intermediate = os.fork()
        except OSError as error:  # no room for another process, on the machine or in the job's cgroup
            self.send("Refused", group=request["fork"], why=f"fork: {error.strerror}")
            return None
        if intermediate:
            for channel in channels:
                channel.close()
            _, status = os.waitpid(intermediate, 0)
            if status:  # the workers forked so far read end of file, and exit
                self.send("Refused", group=request["fork"], why="the template could not fork all of its workers")
            return None
        pids = []
        self.intermediate = os.getpid()
        for role, channel in enumerate(channels):
            pid = os.fork()
            if pid == 0:
                self.control.close()
                for other in channels:
                    if other is not channel:
                        other.close()
                return self.wait_as_child(is_store=role == 0 and request["store"], channel=channel)
            pids.append(pid)
        self.send("Forked", group=request["fork"], pids=pids)
        os._exit(0)

    def wait_as_child(self, is_store: bool, channel: socket.socket) -> LaunchConfig:
        """Wait, as the owner's child, for the listening socket (the store) or the release (a worker)."""
        os.setsid()
        self.await_adoption()
        if is_store:
            self.libc.prctl(PR_SET_NAME, b"elasticd-store", 0, 0, 0)
            address, fds = self.channel.receive_with_descriptors(channel, 1)
            if address is not None:
                self.store.serve(self.tcp_store, address["host"], fds[0], channel)
            os._exit(0)
        release: LaunchConfig | None = self.channel.receive(channel)
        if release is None:
            os._exit(0)
        self.launch = channel
        self.restore_signal_handlers()
        return release

    def restore_signal_handlers(self) -> None:
        """But those for which a preloaded module has installed a handler of its own."""
        for number, (before, ours) in self.signal_handlers.items():
            if signal.getsignal(number) is ignore_signal and self.signal_handler_address(number) == ours:
                signal.signal(number, before)

    def signal_handler_address(self, number: int) -> int:
        """The address that the kernel calls, 0 for the default: faulthandler.register and libraries install handlers
        that Python does not know of."""
        action = (ctypes.c_void_p * 64)()  # struct sigaction, which begins with it; longer than any
        self.libc.sigaction(number, None, action)
        return action[0] or 0

    def await_adoption(self) -> None:
        """PDEATHSIG refers to the parent at the time of the call: set it after the owner has adopted this process.

        Another parent means that the owner was killed meanwhile, and no process would end this one.
        """
        deadline = time.monotonic() + ADOPTION_DEADLINE_S
        while (parent := os.getppid()) != self.config["owner"]:
            if parent != self.intermediate or time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.0005)
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.config["owner"]:
            os._exit(1)

    def become_worker(self, release: LaunchConfig) -> None:
        """Make this process equal to a fresh interpreter before it runs the script."""
        self.restore_nvml()
        self.libc.prctl(PR_SET_NAME, self.comm, 0, 0, 0)
        os.environ.clear()
        os.environ.update(self.env)
        os.environ.update(release["env"])
        self.keep_launch_channel()
        share = load_module_file("_elasticd_cpus", self.config["cpu_binding"]).bind_to_cpus(release.get("cpus", ()))
        logs = {fd: path for path, fd in ((release["stdout"], 1), (release["stderr"], 2)) if path is not None}
        for fd, path in logs.items():
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        if logs:
            self.console.survive_closed_console(logs, full_disk_reporter(self.library))
        self.reseed_generators()
        self.reset_standard_library()
        self.hidden.when_imported("numpy", self.give_blas_its_threads)
        self.hidden.triggers_with_environment = frozenset(self.config["required"])
        started_with = dict(os.environ)
        torch = self.hidden.get_loaded("torch")

        def adapt_torch() -> None:
            scale_torch_threads(torch, share)
            apply_environment_changes(torch, self.config["read_at_import"], started_with)

        def adapt_compiler() -> None:
            apply_environment_changes(torch, self.config["read_by_compiler"], started_with)

        self.hidden.when_imported("torch", adapt_torch)
        self.hidden.when_imported("torch._dynamo", adapt_compiler)
        self.after_import("torch.optim.optimizer", start_heartbeat(self.config, self.library))
        for name in self.config["integrate"]:
            self.after_import(name, integrate)

    def after_import(self, name: str, then: Callable[[Any], None]) -> None:
        """Call back once the script has imported a module, preloaded or not."""
        module = self.hidden.get_loaded(name)
        if module is None:
            after_import(name, then)
        else:
            self.hidden.when_imported(name, lambda: then(module))

    def keep_launch_channel(self) -> None:
        """`session.run` parks this process, which is released again by it; programs that the script starts lack it."""
        hooks = load_module_file("_elasticd_hooks", self.config["debug_hooks"])
        with contextlib.suppress(OSError):
            os.environ["ELASTICD_LAUNCH"] = str(hooks.duplicate_to_high_fd(self.launch.fileno()))
        self.launch.close()

    def reseed_generators(self) -> None:
        """Fresh entropy for generators that a fork shares; Python's own `random` reseeds itself."""
        torch = self.hidden.get_loaded("torch")
        if torch is not None:
            torch.default_generator.seed()
        numpy_random = self.hidden.get_loaded("numpy.random.mtrand")
        if numpy_random is not None:
            numpy_random.seed()
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None:
            multiprocessing.current_process().authkey = os.urandom(32)

    def reset_standard_library(self) -> None:
        """State that a fresh interpreter would determine itself."""
        known: dict[str, Any] = {**sys.modules}
        if "tempfile" in known:
            known["tempfile"].tempdir = None
        if "threading" in known:
            known["threading"].main_thread()._set_native_id()

    def give_blas_its_threads(self) -> None:
        """Let BLAS start as many threads as if it were loaded now."""
        threads = next(
            (
                self.env[name]
                for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
                if name in self.env
            ),
            str(len(os.sched_getaffinity(0))),
        )
        if not threads.isdigit() or int(threads) <= 1:
            return
        for path in mapped_libraries("openblas"):
            library = ctypes.CDLL(path)
            for symbol in (
                "scipy_openblas_set_num_threads64_",
                "openblas_set_num_threads64_",
                "openblas_set_num_threads",
            ):
                if hasattr(library, symbol):
                    getattr(library, symbol)(int(threads))
                    break


def scale_torch_threads(torch: Any, share: float) -> None:
    """torch has counted the template's CPUs, of which this worker may use a share."""
    if share < 1 and not any(os.environ.get(name, "").isdigit() for name in THREAD_COUNT_VARIABLES):
        torch.set_num_threads(max(1, round(torch.get_num_threads() * share)))


def apply_environment_changes(torch: Any, read_at_import: str, before: dict[str, str]) -> None:
    """Apply what a module has set before torch, or its compiler, is imported, although it has been loaded already."""
    for name in sorted(set(os.environ) | set(before)):
        value = os.environ.get(name, "")
        if value == before.get(name, "") or not re.match(read_at_import, name):
            continue
        before[name] = value  # said once
        if name in THREAD_COUNT_VARIABLES and value.isdigit() and int(value):
            given = (os.environ.get(variable, "") for variable in THREAD_COUNT_VARIABLES)
            torch.set_num_threads(next(int(text) for text in given if text.isdigit() and int(text)))
        elif name != "TORCHINDUCTOR_CACHE_DIR":  # read when it compiles
            print(
                f"elasticd: {name} was changed before torch read it, but the warm launcher had loaded torch: this has "
                f"no effect. Set {name} in the script itself or outside",
                file=sys.stderr,
            )


def ignore_signal(number: int, frame: Any) -> None:
    pass


def mapped_libraries(fragment: str) -> list[str]:
    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if fragment.encode() in line and b".so" in line}
    return sorted(map(os.fsdecode, paths))


def find_open_device() -> str | None:
    """An accelerator's device file that this process has open."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(DEVICE_FILES):
                return path
    return None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once a module has been imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, then: Callable[[Any], None]) -> None:
    if name in sys.modules:  # a .pth file of the job's environment has imported it
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def integrate(module: Any) -> None:
    """Let a framework that the script has imported add its callback (--integrate)."""
    try:
        automatic = importlib.import_module("elasticd.integrations.automatic")
    except ImportError as error:
        print(f"elasticd: --integrate auto: this interpreter cannot import elasticd: {error}", file=sys.stderr)
        return
    automatic.integrate(module)


def start_heartbeat(config: LaunchConfig, library: dict[str, ModuleType]) -> Callable[[Any], None]:
    """Start this worker's heartbeat; returns a function to call with torch.optim.optimizer once that is imported."""
    record = library["elasticd.heartbeat.record"]
    writer = record.from_environment()
    # Exit handlers run last in, first out: the exit report comes last, after the heartbeat thread has ended.
    library["elasticd.heartbeat.exit_report"].install_exit_report(writer)
    thread = library["elasticd.heartbeat.thread"].HeartbeatThread(writer, os.environ.get("ELASTICD_FLIGHT", ""))
    stacks = load_module_file("_elasticd_stacks", config["debug_hooks"])
    stacks.allow_tracing_by(config["agent"])
    if "ELASTICD_STACKS" in os.environ:
        stacks.write_stacks_on_signal(record.STACKS_SIGNAL, os.environ["ELASTICD_STACKS"])

    def begin(module: Any) -> None:
        install = library["elasticd.heartbeat.optimizer_hook"].install_optimizer_hook
        install(writer, module.register_optimizer_step_post_hook)
        thread.start()

    return begin

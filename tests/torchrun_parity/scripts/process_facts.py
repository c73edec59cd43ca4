"""Facts of the process and its interpreter. Imports nothing beyond the standard library, and no torch."""

import atexit
import codecs
import faulthandler
import gc
import locale
import logging
import logging.config
import os
import resource
import signal
import site
import stat
import sys
import tempfile
import threading
import time
import warnings


def main_module(module):
    spec = module.__spec__
    return {
        "name": module.__name__,
        "file": getattr(module, "__file__", None),
        "package": module.__package__,
        "doc": module.__doc__,
        "loader": type(module.__loader__).__name__,
        "cached": getattr(module, "__cached__", None),
        "spec": spec and [spec.name, spec.origin, spec.parent, type(spec.loader).__name__],
        "annotations": getattr(module, "__annotations__", None),
        "builtins": type(module.__builtins__).__name__,
    }


def interpreter():
    import builtins

    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path[0]": sys.path[0],
        "path": list(sys.path),
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "executable": [sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix],
        "pycache": [sys.pycache_prefix, sys.dont_write_bytecode],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "dlopen": sys.getdlopenflags(),
        "int digits": sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None,
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            sys.breakpointhook is sys.__breakpointhook__,
            threading.excepthook is threading.__excepthook__,
            sys.gettrace(),
            sys.getprofile(),
            threading.gettrace(),
            [getattr(hook, "__qualname__", repr(hook)) for hook in sys.path_hooks],
            sys.get_asyncgen_hooks(),
        ],
        "last error": [
            name for name in ("last_type", "last_value", "last_traceback", "last_exc") if hasattr(sys, name)
        ],
        "builtins": sorted(vars(builtins)),
        "site": [site.ENABLE_USER_SITE, site.PREFIXES],
        "hash algorithm": repr(sys.hash_info),
        "hash of a seeded string": hash("elastic") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
    }


def process():
    with open("/proc/self/cmdline", "rb") as file:
        command = file.read().decode(errors="surrogateescape").split("\0")
    with open("/proc/self/comm") as file:
        comm = file.read()
    with open("/proc/self/stat") as file:
        terminal = file.read().rpartition(")")[2].split()[4]
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    names = (
        "Umask Uid Gid Groups CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp SigIgn SigCgt SigBlk SigPnd ShdPnd"
    )
    umask = os.umask(0)
    os.umask(umask)
    pid = os.getpid()
    return {
        "command line": command,
        "comm": comm,
        "controlling terminal": terminal,
        "own group, own session": [os.getpgid(0) == pid, os.getsid(0) == pid],
        "is the main thread": [
            threading.main_thread().ident == threading.get_ident(),
            threading.get_native_id() == pid,
        ],
        "native id": threading.main_thread().native_id == pid,
        "thread": [threading.current_thread().name, threading.active_count(), threading.stack_size()],
        "status": {name: status.get(name) for name in names.split()},
        "umask": umask,
        "directory": os.getcwd(),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
        "nice": [os.nice(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "affinity": [sorted(os.sched_getaffinity(0)), os.cpu_count()],
        "processor time is one's own": time.process_time() < 30,
        "nothing waits for us": child_processes(),
    }


def child_processes():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())


def descriptors():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]
        except OSError:  # the one that listed the directory
            continue
        if int(fd) > 2 and not kind.startswith(("/tmp", "pipe", "socket", "anon_inode")):
            found.append(kind)
    return sorted(found)


def signals():
    return {
        "handlers": {
            sig.name: repr(signal.getsignal(sig)).partition(" at 0x")[0]
            for sig in sorted(signal.valid_signals())
            if isinstance(sig, signal.Signals)
        },
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "pending": sorted(map(int, signal.sigpending())),
        "timers": [
            signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "wakeup": signal.set_wakeup_fd(-1),
        "alarm": signal.alarm(0),
        "interrupts": _interrupted(),
    }


def _interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


def streams():
    found = {}
    for fd, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        found[stream.name] = {
            "encoding": [stream.encoding, stream.errors, stream.newlines],
            "buffering": [stream.line_buffering, getattr(stream, "write_through", None), type(stream.buffer).__name__],
            "mode": [stream.mode, stream.fileno() == fd, stream.isatty(), stat.S_IFMT(os.fstat(fd).st_mode)],
            "blocking": os.get_blocking(fd),
            "inheritable": os.get_inheritable(fd),
        }
    found["locale"] = [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding()]
    found["filesystem"] = [sys.getfilesystemencodeerrors(), sys.getdefaultencoding()]
    if os.environ.get("PROBE_READS_STDIN"):
        found["read"] = sys.stdin.read()
    return found


def states():
    return {
        "warnings": [repr(entry) for entry in warnings.filters],
        "warning functions": [
            warnings.showwarning.__module__,
            warnings.formatwarning.__module__,
            warnings.defaultaction,
        ],
        "logging": [
            logging.root.level,
            repr(logging.root.handlers),
            logging.root.manager.disable,
            logging.raiseExceptions,
        ],
        "logger class": [
            logging.getLoggerClass().__name__,
            logging.getLogRecordFactory().__name__,
            logging._srcfile == __file__,
        ],
        "level names": [logging.getLevelName(level) for level in range(101)],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)],
        "fault handler": faulthandler.is_enabled(),
        "temporary": tempfile.tempdir,
        "error handler": codecs.lookup_error("strict").__name__,
        "tracing": __import__("tracemalloc").is_tracing(),
        "socket": __import__("socket").getdefaulttimeout(),
        "decimal": repr(__import__("decimal").getcontext()),
        "start method": __import__("multiprocessing").get_start_method(allow_none=True),
        "copyreg": sorted(key.__name__ for key in __import__("copyreg").dispatch_table),
        "excepthook of threads": threading.excepthook.__name__,
        "profiled": sys.getprofile() is None,
        "uuid node": __import__("uuid")._node,
        "abstract numbers": sorted(cls.__name__ for cls in __import__("numbers").Number.__subclasses__()),
    }


def customized(out):
    """What the user's own sitecustomize and usercustomize did, and in which process."""
    import builtins

    with open(os.path.join(out, f"customized-{os.environ['RANK']}")) as file:
        lines = [line.split() for line in file]
    return {
        "ran": [[name, int(pid) == os.getpid()] for name, pid, *_ in lines],
        "saw": [rest for _, _, *rest in lines],
        "left": getattr(builtins, "customized_by", None),
        "module": [getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize")],
        "spec": [
            getattr(getattr(sys.modules.get(name), "__spec__", None), "name", None)
            for name in ("sitecustomize", "usercustomize")
        ],
    }


def random_streams():
    """Unseeded streams as they come; seeded ones are to be the same everywhere."""
    import random
    import secrets
    import uuid

    unseeded = {
        "random": random.random(),
        "secrets": secrets.token_hex(8),
        "uuid": str(uuid.uuid4()),
        "urandom": os.urandom(8).hex(),
        "temporary": tempfile.mktemp(),
        "key": __import__("multiprocessing").current_process().authkey.hex(),
    }
    random.seed(7)
    return {"unseeded": unseeded, "seeded": [random.random() for _ in range(4)]}


def prepare_for_import():
    """What scripts do before they import torch, and expect to have its usual effect afterwards."""
    logging.config.dictConfig({"version": 1, "root": {"level": "WARNING", "handlers": []}})
    warnings.simplefilter("default")
    folder = os.path.join(os.environ["PROBE_OUT"], "tmp")
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"] = folder
    return {"temporary": tempfile.gettempdir(), "filters": len(warnings.filters)}


def after_import():
    manager = logging.root.manager
    loggers = {name: log for name, log in manager.loggerDict.items() if isinstance(log, logging.Logger)}
    names = ("torch", "torch.distributed", "torch.nn.parallel.distributed", "torch._dynamo", "torch.fx")
    return {
        "loggers": {name: _logger(loggers.get(name)) for name in names},
        "disabled": sorted(name for name, log in loggers.items() if log.disabled and name in sys.modules),
        "filters": [repr(entry) for entry in warnings.filters],
        "environment": dict(os.environ),
        "signals": signals(),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "recursion": sys.getrecursionlimit(),
        "threads": threading.active_count(),
        "temporary": tempfile.gettempdir(),
        "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
        "copyreg": sorted(key.__name__ for key in __import__("copyreg").dispatch_table),
    }


def _logger(log):
    return log and [log.level, log.getEffectiveLevel(), log.propagate, log.disabled, len(log.handlers), log.parent.name]


def of_child():
    import multiprocessing

    return {
        "path": sys.path,
        "python path": os.environ.get("PYTHONPATH"),
        "rank": os.environ.get("RANK"),
        "launcher's": os.environ.get("ELASTICD_LAUNCH", "").startswith("{"),
        "argv": sys.argv,
        "flags": repr(sys.flags),
        "name": multiprocessing.current_process().name,
        "preloaded": sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"}),
        "group is the parent's": os.getpgid(0) == os.getpgid(os.getppid()),
        "handlers": signals()["handlers"],
        "meta path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    }


def fault_handler(out):
    path = os.path.join(out, f"fault-{os.environ['RANK']}")
    with open(path, "w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback(file, all_threads=False)
        faulthandler.dump_traceback_later(0.05, file=file)
        deadline = time.monotonic() + 20
        while os.path.getsize(path) < 400 and time.monotonic() < deadline:
            time.sleep(0.02)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    with open(path) as file:
        lines = file.read().splitlines()
    now, _, later = "\n".join(lines).partition("Timeout")
    frames = [line.strip() for line in later.splitlines() if __file__ in line]
    return {"now": [line for line in now.splitlines() if line.startswith("  ")], "later names us": bool(frames)}


def register_exits(path):
    """Exit handlers run last in, first out; threads are joined before them."""

    def say(what):
        with open(path, "a") as file:
            file.write(what + "\n")

    atexit.register(say, "registered first")
    atexit.register(say, "registered last")
    threading.Thread(target=lambda: (threading.main_thread().join(20), say("thread"))).start()

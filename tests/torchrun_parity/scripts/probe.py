"""Reports what a script can see of the process it runs in, as JSON, one file a rank. Nothing here knows a launcher."""

import sys

FIRST = {
    "modules": sorted(sys.modules),
    "path": list(sys.path),
    "names in __main__": sorted(globals()),
    "meta path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
}

import json  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

FIRST["descriptors"] = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) <= 2}
FIRST["descriptors beyond stderr"] = sorted(
    os.readlink(f"/proc/self/fd/{fd}")
    for fd in os.listdir("/proc/self/fd")
    if os.path.exists(f"/proc/self/fd/{fd}") and int(fd) > 2
)
FIRST["threads"] = len(os.listdir("/proc/self/task"))
FIRST["environment"] = dict(os.environ)

import process_facts  # noqa: E402
import torch_facts  # noqa: E402

OUT = os.environ["PROBE_OUT"]
RANK = int(os.environ["RANK"])


class Parcel:
    """A class of `__main__`, to be pickled."""

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return type(other) is Parcel and other.content == self.content

    def __hash__(self):
        return hash(self.content)


def child(queue, parcel):
    """Run in a child of every kind: what it sees, and a parcel back."""
    seen = process_facts.of_child()
    seen["main is in"] = [name for name in ("__main__", "__mp_main__") if name in sys.modules]
    seen["parcel is of"] = type(parcel).__module__
    queue.put((seen, Parcel([*parcel.content, "back"])))


def children(methods):
    import multiprocessing
    import pickle

    copied = pickle.loads(pickle.dumps(Parcel([RANK])))
    found = {"pickled": copied == Parcel([RANK]), "default": multiprocessing.get_start_method()}
    for method in methods:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, Parcel(["out"])))
        process.start()
        seen, parcel = queue.get(timeout=50)
        process.join(50)
        found[method] = [seen, parcel.content, isinstance(parcel, Parcel), process.exitcode, process.name]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found["pool"] = pool.map(abs, range(-4, 0))
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # a joined thread may need a moment to be gone
    return found


def compiled():
    """Here rather than in its own file: that the script says torch.compile has the compiler preloaded."""
    import shutil

    import torch

    def curve(x):
        return torch.sin(x) * 2 + x.sum()

    x = torch.arange(6, dtype=torch.float32, requires_grad=True)
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    result = torch.compile(curve, backend=backend, fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    return [result.tolist(), gradient.tolist(), dict(torch._dynamo.utils.counters["stats"])]


def main():
    facts = {"first": FIRST}

    left_out = os.environ["PROBE_LEAVES_OUT"].split()

    def take(name, function, *args):
        if name in left_out:
            return
        try:
            facts[name] = function(*args)
        except Exception:  # noqa: BLE001 (it is what this reports)
            facts[name] = {"raised": traceback.format_exc()}

    thorough = RANK == 0 and not left_out
    take("main", process_facts.main_module, sys.modules["__main__"])
    take("interpreter", process_facts.interpreter)
    take("process", process_facts.process)
    take("signals", process_facts.signals)
    take("streams", process_facts.streams)
    take("states", process_facts.states)
    take("hooks", process_facts.customized, OUT)
    take("random", process_facts.random_streams)
    take("uninstalled", torch_facts.before_import)
    take("children", children, ("fork", "spawn", "forkserver") if thorough else ("fork",))
    take("prepared", process_facts.prepare_for_import)
    take("numpy", torch_facts.numpy_alone)
    take("torch", torch_facts.torch_imported)
    take("consequences", process_facts.after_import)
    take("lasting", torch_facts.identities)
    take("streams of torch", torch_facts.random_streams)
    take("training", torch_facts.train)
    if thorough:
        take("compiled", compiled)
    take("loaders", torch_facts.loaders, (None, "spawn") if thorough else (None,))
    take("fault handler", process_facts.fault_handler, OUT)
    take("traceback", torch_facts.traceback_through_torch)
    take("descriptors at the end", process_facts.descriptors)
    take("children at the end", process_facts.child_processes)
    process_facts.register_exits(os.path.join(OUT, f"exits-{RANK}"))
    with open(os.path.join(OUT, f"facts-{RANK}.json"), "w") as file:
        json.dump(facts, file, default=repr)
    print(f"rank {RANK} has reported")


if __name__ == "__main__":
    main()

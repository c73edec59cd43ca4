"""Facts that need torch or numpy. Imports them inside its functions only, in the order a script would."""

import gc
import os
import sys


def _third_party():
    """Loaded modules that are not the standard library's, by name."""
    ours = ("probe", "process_facts", "torch_facts", "sitecustomize", "usercustomize", "pkg")
    return sorted(name for name in sys.modules if name.partition(".")[0] not in (*sys.stdlib_module_names, *ours))


def threads():
    return len(os.listdir("/proc/self/task"))


def spec_of(name):
    import importlib.util

    spec = importlib.util.find_spec(name)
    return spec and [
        spec.name,
        spec.origin,
        spec.cached,
        spec.has_location,
        spec.parent,
        list(spec.submodule_search_locations or ()),
        spec.loader is not None,
    ]


def before_import():
    """torch can be found, and asked about, before it is imported, and is not imported by that."""
    import importlib.metadata
    import pkgutil

    found = {name: spec_of(name) for name in ("torch", "numpy", "torchgen", "typing_extensions", "no_such_module")}
    found["path"] = os.path.basename(pkgutil.get_loader("torch").get_filename()) if sys.version_info < (3, 12) else ""
    found["version"] = [importlib.metadata.version(name) for name in ("torch", "numpy")]
    found["name"] = importlib.metadata.metadata("torch")["Name"]
    found["listed"] = sorted(
        {module.name for module in pkgutil.iter_modules()} & {"torch", "numpy", "functorch", "process_facts"}
    )
    found["third party"] = _third_party()
    return found


def blas_threads():
    import ctypes

    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line and ".so" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(library, name):
                return getattr(library, name)()
    return None


def numpy_alone():
    before = threads()
    import numpy

    imported = threads()
    modules = [name for name in _third_party() if name.startswith("torch")]
    square = numpy.ones((600, 600)) @ numpy.ones((600, 600))
    unseeded = [float(numpy.random.rand()), float(numpy.random.default_rng().random())]
    numpy.random.seed(7)
    return {
        "threads": [before, imported, threads()],
        "blas": blas_threads(),
        "product": float(square.sum()),
        "unseeded": unseeded,
        "seeded": [float(numpy.random.rand()), float(numpy.random.default_rng(7).random())],
        "torch came too": modules,
        "modules": [name for name in _third_party() if name.startswith("numpy")],
        "error state": numpy.geterr(),
        "print options": repr(numpy.get_printoptions()),
    }


def torch_imported():
    import torch

    return {
        "third party": _third_party(),
        "names": sorted(vars(torch)),
        "dir": sorted(dir(torch)),
        "spec": spec_of("torch"),
        "loader": [
            type(torch.__loader__).__name__,
            type(torch.__spec__.loader).__name__,
            torch.__spec__.loader is torch.__loader__,
        ],
        "names of its modules": {
            name: sorted(key for key in vars(module) if not key.startswith("__"))
            for name, module in sorted(sys.modules.items())
            if name.partition(".")[0] in ("torch", "numpy") and module is not None and name != "torch._C"
        },
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threads()],
        "defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()],
        "anomaly": [
            torch.is_anomaly_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "accelerator": [torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "backends": [torch.backends.mkldnn.is_available(), torch.backends.openmp.is_available()],
        "parallel": torch.__config__.parallel_info(),
        "meta path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    }


def identities():
    """Imported twice is imported once; what is found by name is what is there."""
    import importlib
    import inspect
    import io
    import pickle

    import numpy
    import torch
    from torch import nn

    name_of_dynamo = "torch._dynamo"
    dynamo = importlib.import_module(name_of_dynamo)
    attribute = vars(torch)[name_of_dynamo.rpartition(".")[2]]
    buffer = io.BytesIO()
    torch.save({"layer": nn.Linear(2, 2).state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)

    class Mine(nn.Module):
        pass

    return {
        "one torch": [torch is sys.modules["torch"], torch is importlib.import_module("torch")],
        "one dynamo": [dynamo is attribute, dynamo is sys.modules[name_of_dynamo], dynamo.config is attribute.config],
        "specs": [spec_of(name) for name in ("torch", name_of_dynamo, "torch.nn.functional", "numpy.linalg")],
        "attributes are modules": sorted(
            name
            for name, module in sys.modules.items()
            if name.startswith(("torch.", "numpy."))
            and isinstance(
                getattr(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2], module), type(sys)
            )
            and getattr(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2], module) is not module
        ),
        "source": len(inspect.getsource(nn.functional.relu)),
        "file": inspect.getsourcefile(nn.Linear),
        "module": inspect.getmodule(nn.Linear).__name__,
        "pickled": [
            pickle.loads(pickle.dumps(torch.arange(3))).tolist(),
            pickle.loads(pickle.dumps(numpy.arange(3))).tolist(),
            type(pickle.loads(pickle.dumps(nn.ReLU()))).__name__,
            pickle.loads(pickle.dumps(torch.float32)) is torch.float32,
        ],
        "saved": sorted(loaded["layer"]),
        "subclasses": Mine in nn.Module.__subclasses__(),
        "datasets": sorted(cls.__name__ for cls in torch.utils.data.Dataset.__subclasses__()),
        "optimizers": sorted(cls.__name__ for cls in torch.optim.Optimizer.__subclasses__()),
        "third party": _third_party(),
    }


def random_streams():
    import numpy
    import torch

    unseeded = {
        "initial seed": torch.initial_seed(),
        "torch": torch.rand(1).item(),
        "numpy": float(numpy.random.default_rng().random()),
    }
    torch.manual_seed(7)
    return {"unseeded": unseeded, "seeded": torch.rand(4).tolist(), "cuda": torch.cuda.default_generators}


def train():
    """A few steps of DDP: the numbers must be the same, bit for bit."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(11)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    found = {
        "losses": losses,
        "backend": dist.get_backend(),
        "elastic": dist.is_torchelastic_launched(),
        "third party": _third_party(),
        "sum": sum(parameter.double().sum().item() for parameter in model.parameters()),
        "own hooks": len(optimizer._optimizer_step_post_hooks),
    }
    # Or DDP's reducer is the last to hold the process group, and may dead-lock with gloo's thread (pytorch#56297).
    del model, loss
    gc.collect()
    dist.destroy_process_group()
    return found


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import random

        import torch

        info = torch.utils.data.get_worker_info()
        return index, info.id, info.seed, random.random(), torch.rand(1).item(), torch.get_num_threads()


def loaders(methods):
    import torch
    from torch.utils.data import DataLoader

    found = {}
    for method in methods:
        torch.manual_seed(13)
        loader = DataLoader(
            Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method, collate_fn=list, timeout=90
        )
        found[method or "default"] = [list(map(list, batch)) for batch in loader]
    return found


def traceback_through_torch():
    import traceback

    import torch

    try:
        torch.nn.Linear(3, 4)(torch.ones(5))
    except RuntimeError:
        return traceback.format_exc()
    return "nothing was raised"

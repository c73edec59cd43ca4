"""where: stacks of real hangs (torch 2.13 on gloo, Python 3.11) and of things that only look alike."""

from __future__ import annotations

import pytest

from elasticd_agent.hangs.collector.classify import (
    StackContext,
    StackLocation,
    is_alone,
    locate,
    representative_thread,
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


SCRIPT = ("train /home/me/train.py:88", "<module> /home/me/train.py:120")
LOGGED = f"_exception_logger.<locals>.wrapper {TORCH}/distributed/c10d_logger.py:83"
BACKWARD = (
    f"_engine_run_backward {TORCH}/autograd/graph.py:979",
    f"backward {TORCH}/autograd/__init__.py:395",
    f"Tensor.backward {TORCH}/_tensor.py:623",
)
WAITS = StackContext(idle=True, group=True)

TABLE = {
    "an all-reduce": ([f"all_reduce {C10D}:3252", LOGGED, *SCRIPT], "collective", "all_reduce"),
    "of an older python, which knows no qualified names": (
        [f"all_reduce {C10D}:3252", f"wrapper {TORCH}/distributed/c10d_logger.py:83", *SCRIPT],
        "collective",
        "all_reduce",
    ),
    "one collective inside another is what the script called": (
        [f"all_gather {C10D}:4287", LOGGED, f"all_gather_object {C10D}:3513", LOGGED, *SCRIPT],
        "collective",
        "all_gather_object",
    ),
    "a barrier": ([f"barrier {C10D}:5356", LOGGED, *SCRIPT], "collective", "barrier"),
    "recv": ([f"recv {C10D}:2799", LOGGED, *SCRIPT], "collective", "recv"),
    "pickling before a collective": (
        [f"_object_to_tensor {C10D}:3410", f"all_gather_object {C10D}:3500", LOGGED, *SCRIPT],
        "elsewhere",
        "train.py:88 train",
    ),
    "the script's own pickling before a collective": (
        ["Big.__getstate__ /home/me/big.py:7", f"_object_to_tensor {C10D}:3410", *SCRIPT],
        "elsewhere",
        "big.py:7 __getstate__",
    ),
    "the script's own function of that name": (
        ["all_reduce /home/me/distributed_c10d.py:1", *SCRIPT],
        "elsewhere",
        None,
    ),
    "a functional collective": (
        [
            f"OpOverloadPacket.__call__ {TORCH}/_ops.py:1279",
            f"wait_tensor {TORCH}/distributed/_functional_collectives.py:142",
            *SCRIPT,
        ],
        "collective",
        "a functional collective",
    ),
    "buffers sent around before forward": (
        [
            f"DistributedDataParallel._distributed_broadcast_coalesced {DDP}:2363",
            f"DistributedDataParallel._sync_module_buffers {DDP}:2429",
            f"DistributedDataParallel._pre_forward {DDP}:1782",
            f"DistributedDataParallel.forward {DDP}:1886",
            f"Module._call_impl {TORCH}/nn/modules/module.py:1789",
            *SCRIPT,
        ],
        "collective",
        "DDP.forward",
    ),
    "DDP is made": (
        [
            f"_verify_param_shape_across_processes {TORCH}/distributed/utils.py:286",
            f"DistributedDataParallel.__init__ {DDP}:1064",
            *SCRIPT,
        ],
        "collective",
        "DDP.__init__",
    ),
    "the script's model inside of DDP": (
        ["Net.forward /home/me/net.py:5", f"DistributedDataParallel.forward {DDP}:1890", *SCRIPT],
        "elsewhere",
        "net.py:5 forward",
    ),
    "a layer of torch's in the script's model": (
        [f"Linear.forward {TORCH}/nn/modules/linear.py:125", "Net.forward /home/me/net.py:5", *SCRIPT],
        "elsewhere",
        "net.py:5 forward",
    ),
    "backward": ([*BACKWARD, *SCRIPT], "collective", "backward"),
    "the script's own backward": (
        [
            "Mine.backward /home/me/ops.py:3",
            f"BackwardCFunction.apply {TORCH}/autograd/function.py:325",
            *BACKWARD,
            *SCRIPT,
        ],
        "elsewhere",
        "ops.py:3 backward",
    ),
    "a compile in backward, which waits for processes that compile": (
        [
            f"Condition.wait {PYTHON}/threading.py:327",
            f"AsyncCompile.wait {TORCH}/_inductor/async_compile.py:500",
            *BACKWARD,
            *SCRIPT,
        ],
        "elsewhere",
        "train.py:88 train",
    ),
    "the store of init_process_group": (
        [
            f"_create_c10d_store {TORCH}/distributed/rendezvous.py:199",
            f"_env_rendezvous_handler {TORCH}/distributed/rendezvous.py:280",
            f"init_process_group {C10D}:1892",
            *SCRIPT,
        ],
        "init",
        "rendezvous",
    ),
    "the group of init_process_group": (
        [f"_new_process_group_helper {C10D}:2169", f"init_process_group {C10D}:1930", LOGGED, *SCRIPT],
        "init",
        "init_process_group",
    ),
    "new_group": (
        [
            f"_new_process_group_helper {C10D}:2169",
            f"_new_group_with_tag {C10D}:6056",
            f"new_group {C10D}:5863",
            *SCRIPT,
        ],
        "init",
        "new_group",
    ),
    "torch.cuda.synchronize": ([f"synchronize {TORCH}/cuda/__init__.py:1209", *SCRIPT], "device", "synchronize"),
    "event.synchronize": ([f"Event.synchronize {TORCH}/cuda/streams.py:231", *SCRIPT], "device", "synchronize"),
    "session.barrier": (
        [
            f"Condition.wait {PYTHON}/threading.py:331",
            f"Event.wait {PYTHON}/threading.py:629",
            f"Barriers._meet {ELASTICD}/coordination/barrier.py:87",
            f"Session.barrier {ELASTICD}/session.py:231",
            *SCRIPT,
        ],
        "barrier",
        "session.barrier",
    ),
    "session.step": (
        [
            f"Channel._wait {ELASTICD}/coordination/store_channel.py:132",
            f"Decisions._take {ELASTICD}/coordination/decisions.py:97",
            f"Session.step {ELASTICD}/session.py:200",
            *SCRIPT,
        ],
        "barrier",
        "session",
    ),
    "a checkpoint that the others wait for": (
        [
            f"fsync {ELASTICD}/checkpointing/saver.py:50",
            f"Channel.together {ELASTICD}/coordination/store_channel.py:75",
            f"Session.restore {ELASTICD}/session.py:150",
            *SCRIPT,
        ],
        "elsewhere",
        "train.py:88 train",
    ),
    "a script in a directory called elasticd": (
        ["wait /home/me/elasticd/train.py:4", "<module> /home/me/elasticd/train.py:9"],
        "elsewhere",
        "train.py:4 wait",
    ),
    "a DataLoader's queue": (
        [
            f"_PollLikeSelector.select {PYTHON}/selectors.py:415",
            f"Queue.get {PYTHON}/multiprocessing/queues.py:113",
            f"_MultiProcessingDataLoaderIter._try_get_data {TORCH}/utils/data/dataloader.py:1291",
            *SCRIPT,
        ],
        "elsewhere",
        "train.py:88 train",
    ),
    "a library that calls a collective": (
        [
            f"all_reduce {C10D}:3252",
            LOGGED,
            "reduce /opt/venv/lib/python3.11/site-packages/accelerate/ops.py:5",
            *SCRIPT,
        ],
        "collective",
        "all_reduce",
    ),
    "a library's own hook in backward": (
        ["clip /opt/venv/lib/python3.11/site-packages/lightning/hooks.py:5", *BACKWARD, *SCRIPT],
        "elsewhere",
        "train.py:88 train",
    ),
    "the script itself": ([*SCRIPT], "elsewhere", "train.py:88 train"),
    "a torch that was built from source": (
        ["all_reduce /home/me/pytorch/torch/distributed/distributed_c10d.py:3252", *SCRIPT],
        "collective",
        "all_reduce",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_locate_table(name: str) -> None:
    calls, where, function = TABLE[name]
    found = locate(stack(*calls), WAITS)
    assert found.where == where
    assert function is None or found.function == function


def test_backward_waits_only_if_idle_and_in_group() -> None:
    frames = stack(*BACKWARD, *SCRIPT)
    assert locate(frames, StackContext(idle=False, group=True)) == StackLocation("elsewhere", "train.py:88 train")
    assert locate(frames, StackContext(idle=True, group=False)) == StackLocation("elsewhere", "train.py:88 train")


@pytest.mark.parametrize(
    ("source", "context", "where"),
    [
        ("work.wait()", {"group": True, "idle": True}, "collective"),
        ("os.wait()", {"group": True, "idle": True}, "elsewhere"),
        ("work.wait()", {"group": True}, "elsewhere"),
        ("work.wait()", {"idle": True}, "elsewhere"),
        ("total += loss.item()", {"cuda": True}, "device"),
        ("total += loss.item()", {}, "elsewhere"),
        ("total += loss.item()", {"cuda": True, "gil": True}, "elsewhere"),
        ("batch = batch.to(device)", {"cuda": True}, "device"),
        ("print(float(loss))", {"cuda": True}, "device"),
        ("batch = next(batches)", {"cuda": True, "group": True, "idle": True}, "elsewhere"),
    ],
)
def test_c_method_is_found_by_source_line(source: str, context: dict[str, bool], where: str) -> None:
    assert locate(stack(*SCRIPT), StackContext(source=source, **context)).where == where


def test_wait_by_a_line_of_source_is_told_from_a_wait_by_frames_of_torch() -> None:
    """A store's `wait` is no collective's: nothing is proven by it."""
    for source, name in (
        ("work.wait()", "work.wait"),
        ("self.store.wait(keys)", "self.store.wait"),
        ("w[0].wait()", "object.wait"),
    ):
        assert locate(stack(*SCRIPT), StackContext(source=source, idle=True, group=True)).function == name
        rank = RankState("a", RankReport(0, 0, where="collective", function=name))
        assert rank.waits
        assert not rank.is_recorded


def test_locate_without_frames() -> None:
    assert locate([], WAITS) == StackLocation("elsewhere", "")


JOIN = stack(
    f"Thread._wait_for_tstate_lock {PYTHON}/threading.py:1139", f"Thread.join {PYTHON}/threading.py:1119", *SCRIPT
)
THREAD = [f"Thread.run {PYTHON}/threading.py:982", f"Thread._bootstrap {PYTHON}/threading.py:1002"]
TRAINS = stack(f"all_reduce {C10D}:3252", LOGGED, "work /home/me/train.py:9", *THREAD)
LOADS = stack("load /home/me/data.py:9", *THREAD)
FEEDS = stack(
    f"Condition.wait {PYTHON}/threading.py:327", f"Queue._feed {PYTHON}/multiprocessing/queues.py:231", *THREAD
)
IDLES = stack(f"_worker {PYTHON}/concurrent/futures/thread.py:81", *THREAD)
SUBMITTED = stack(f"all_reduce {C10D}:3252", LOGGED, f"_WorkItem.run {PYTHON}/concurrent/futures/thread.py:58", *THREAD)


def test_waiting_main_thread_defers_to_other() -> None:
    assert representative_thread([JOIN, LOADS, TRAINS]) == 2
    assert representative_thread([JOIN, FEEDS, IDLES, LOADS]) == 3
    assert representative_thread([JOIN, FEEDS, IDLES]) == 0
    assert representative_thread([JOIN, SUBMITTED]) == 1
    assert representative_thread([stack(f"_shutdown {PYTHON}/threading.py:1590"), TRAINS]) == 1


def test_working_main_thread_counts() -> None:
    meet = f"Barriers._meet {ELASTICD}/coordination/barrier.py:87"
    barrier = stack(f"Event.wait {PYTHON}/threading.py:629", meet, *SCRIPT)
    assert representative_thread([stack(*SCRIPT), TRAINS]) == 0
    assert representative_thread([barrier, TRAINS]) == 0
    assert representative_thread([[], TRAINS]) == 0


def test_short_file_names() -> None:
    assert Frame("f", f"{TORCH}/_tensor.py", 1).short == "torch/_tensor.py"
    assert Frame("f", f"{PYTHON}/threading.py", 1).short == "threading.py"
    assert Frame("f", "/home/me/code/train.py", 1).short == "train.py"
    assert Frame("f", "/src/elasticd/session.py", 1).short == "elasticd/session.py"


def test_place_without_script_frames() -> None:
    assert script_place(stack(f"f {TORCH}/_tensor.py:7")) == "_tensor.py:7 f"


RUN = (f"Thread.run {PYTHON}/threading.py:982", f"Thread._bootstrap {PYTHON}/threading.py:1002")
POOL = f"_worker {PYTHON}/concurrent/futures/thread.py:81"
WAIT = f"wait {PYTHON}/threading.py:327"
OTHER_THREADS = {
    "the heartbeat": ((f"_run {ELASTICD}/heartbeat/thread.py:80", *RUN), True),
    "native, without Python": ((), True),
    "an idle worker of a pool": ((POOL, *RUN), True),
    "a DataLoader's feeder": ((WAIT, f"_feed {PYTHON}/multiprocessing/queues.py:231", *RUN), True),
    "pinned memory": ((f"loop {TORCH}/utils/data/_utils/pin_memory.py:53", *RUN), True),
    "the script's": (("send /home/me/train.py:9", *RUN), False),
    "a worker of a pool with work": (("send /home/me/train.py:9", POOL, *RUN), False),
    "a timer, which calls the script later": ((WAIT, f"Timer.run {PYTHON}/threading.py:1376", RUN[1]), False),
    "an event loop": ((f"run_forever {PYTHON}/asyncio/base_events.py:608", *RUN), False),
    "a server": ((f"serve_forever {PYTHON}/socketserver.py:232", *RUN), False),
    "a pool's callbacks": ((f"_handle_results {PYTHON}/multiprocessing/pool.py:579", *RUN), False),
}


@pytest.mark.parametrize("name", OTHER_THREADS)
def test_main_thread_is_alone(name: str) -> None:
    calls, alone = OTHER_THREADS[name]
    assert is_alone([stack(*SCRIPT), stack(*calls)]) is alone
    assert is_alone([stack(*SCRIPT)])
    assert not is_alone([])

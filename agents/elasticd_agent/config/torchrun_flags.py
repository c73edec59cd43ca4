"""torchrun's own options: each is honored, accepted without effect, or refused with its sentence."""

from __future__ import annotations

from elasticd_agent.config.flag import Flag, Treatment, ValueType

TORCHRUN_FLAGS: tuple[Flag, ...] = (
    Flag(
        "--nnodes N",
        "Nodes of the job, N or MIN:MAX. More than one meet by --rdzv-backend c10d or etcd, with --rdzv-endpoint and "
        "--rdzv-id; the job continues while MIN are left and grows up to MAX.",
        default="1:1",
    ),
    Flag(
        "--nproc-per-node N",
        "Workers on this node: a number, gpu, cpu, auto, or MIN:MAX (ours): start with MAX, and while a slot keeps "
        "failing continue with fewer, down to MIN. gpu and auto count NVIDIA GPUs, subject to CUDA_VISIBLE_DEVICES; "
        "xpu and other accelerators are refused: give the number.",
        default="1",
    ),
    Flag(
        "--rdzv-backend NAME",
        "Where nodes meet: c10d (torch's TCPStore, served by one of the agents) or etcd (v3, by its address). Several "
        "nodes with static meet over c10d at --master-addr and --master-port. etcd-v2 and plug-ins are refused.",
        default="static",
    ),
    Flag(
        "--rdzv-endpoint HOST:PORT",
        "c10d: HOST[:PORT] of the node that serves the store, port 29400 if none is given; one node without an "
        "endpoint, or with port 0, is alone. etcd: HOST[:PORT][,…], port 2379 if none is given; https:// in front "
        "means TLS. IPv6 in brackets. static: in place of --master-addr and --master-port.",
        default="",
    ),
    Flag(
        "--rdzv-id ID",
        "The job's id, TORCHELASTIC_RUN_ID for the workers; none means a random one. (torchrun replaces it by a "
        "random one unless a backend or port is given.) Several nodes: SLURM_JOB_ID, else made from c10d's endpoint; "
        "with etcd they must be given the same one.",
        default="none",
    ),
    Flag(
        "--rdzv-conf K=V,…",
        "Times in seconds: join_timeout (or timeout), last_call_timeout, keep_alive_interval and "
        "keep_alive_max_attempt (their product is the lease); ours: lease, renewal, store_timeout, seen_timeout, "
        "replace_timeout, hold_timeout, adopt_timeout, store_away, grow_debounce, node_cooloff. c10d: is_host. etcd: "
        "protocol, cacert, cert, key, user, password_file, password (or ELASTICD_ETCD_USER, ELASTICD_ETCD_PASSWORD). "
        "Without effect: close_timeout, read_timeout, heartbeat_timeout, use_libuv, rank. Other keys are refused.",
        default="",
    ),
    Flag(
        "--standalone",
        "One node, a free port, a random job id; --rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored.",
    ),
    Flag(
        "--max-restarts N",
        "Given: a hard total of restarts, as in torchrun. Not given: 3 in a row without progress (no new highest step, "
        "no new checkpoint) and --max-restarts-per-hour.",
        value_type=ValueType.INT,
        default_reason="torchrun's default is 0, no restarts at all; a supervisor that never restarts is of no use.",
    ),
    Flag(
        "--monitor-interval S",
        "The exit of a worker is an event; nothing is polled.",
        value_type=ValueType.FLOAT,
        default=0.1,
        treatment=Treatment.NO_EFFECT,
    ),
    Flag(
        "--start-method NAME",
        "Concerns Python functions, which torchrun's command line never starts either.",
        default="spawn",
        treatment=Treatment.NO_EFFECT,
        choices=("spawn", "fork", "forkserver"),
    ),
    Flag(
        "--event-log-handler NAME",
        "torch's event handlers run inside torchrun's process; use --event-log FILE for one JSON object per event.",
        default="null",
        treatment=Treatment.REFUSED,
    ),
    Flag("--role NAME", "The workers' role, ROLE_NAME in their environment.", default="default"),
    Flag("-m, --module", "The script is a module's name, run as python -m does."),
    Flag("--no-python", "The script is a program, started as it is; not with -m."),
    Flag(
        "--run-path", "Runs the script as a script: that is what runpy.run_path imitates. Overrides --no-python and -m."
    ),
    Flag(
        "--log-dir DIR",
        "Where worker logs go, in DIR/round-N/rank-K with the rank in the job; /dev/null keeps none. Jobs that run at "
        "the same time need a DIR each. In a DIR with logs of earlier jobs numbers of rounds continue, and the newest "
        "100 rounds are kept.",
    ),
    Flag(
        "-r, --redirects STREAMS",
        "Which streams go to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or per "
        "local rank, 0:3,1:1.",
        default="0",
    ),
    Flag("-t, --tee STREAMS", "Which streams go to log files and to the console; written as --redirects.", default="0"),
    Flag(
        "--log-line-prefix-template TEXT",
        "Of torch 2.14 and newer. Output of workers has the prefix [role rank]:, which --tee describes.",
        default="",
        treatment=Treatment.REFUSED,
    ),
    Flag(
        "--local-ranks-filter RANKS",
        "Local ranks whose output reaches the console, 0,1,2; the log files keep everything.",
        default="",
    ),
    Flag(
        "--duplicate-stdout-filters WORDS",
        "Stdout lines that contain one of these words go to filtered_stdout.log as well; ',,' is a comma in a word.",
        value_type=ValueType.LIST,
        default=(),
    ),
    Flag(
        "--duplicate-stderr-filters WORDS",
        "Stderr lines that contain one of these words go to filtered_stderr.log as well; ',,' is a comma in a word.",
        value_type=ValueType.LIST,
        default=(),
    ),
    Flag(
        "--node-rank N",
        "Static backend: this node's place among the nodes, as long as all are there; node 0 serves the store. Once a "
        "node is lost, the others come first. Otherwise, as in torchrun, nodes find their ranks by themselves.",
        value_type=ValueType.INT,
        default=0,
    ),
    Flag(
        "--master-addr ADDR",
        "With --master-port and the static backend: the address of node 0, where several nodes meet; with one node, "
        "where the workers' store listens.",
        default="127.0.0.1",
    ),
    Flag(
        "--master-port PORT",
        "Static backend: the port of the workers' store, 0 for a free one; in use, it is an error. Not given: any; of "
        "several nodes, 29500.",
        value_type=ValueType.INT,
    ),
    Flag(
        "--local-addr ADDR",
        "The address of this machine for other nodes, a name or a literal; else that of the interface that reaches the "
        "store, or of the default route where etcd is on loopback. Without effect on one node.",
    ),
    Flag(
        "--logs-specs NAME",
        "torch's log plug-ins run inside torchrun's process; --log-dir, --redirects and --tee say where logs go.",
        treatment=Treatment.REFUSED,
        has_variable=False,
    ),
    Flag(
        "--print-completion SHELL",
        "Of torch 2.14 and newer. elasticd has no scripts for shells.",
        treatment=Treatment.REFUSED,
        choices=("bash", "zsh", "tcsh", "fish", "powershell"),
        has_variable=False,
    ),
    Flag(
        "--numa-binding MODE",
        "Binds each worker to CPUs near its GPU: those of the GPU's NUMA node (node), of its socket (socket), its own "
        "share of the node's cores (exclusive), or the cores of one L3 cache (core-complex). Workers without GPUs are "
        "spread over the nodes. numactl is not needed.",
        choices=("node", "socket", "exclusive", "core-complex"),
        has_variable=False,
    ),
    Flag(
        "--signals-to-handle NAMES",
        "Signals that stop the job when sent to elasticd; they are passed on to the workers.",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Flag(
        "--shutdown-timeout S",
        "Seconds a stopped worker has before SIGKILL; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30. The survivors of a "
        "broken group get none: they can only wait for the dead.",
        value_type=ValueType.INT,
    ),
    Flag("--virtual-local-rank", "Every worker sees LOCAL_RANK=0 and its own GPU as device 0."),
)

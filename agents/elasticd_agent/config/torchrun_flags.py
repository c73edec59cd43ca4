"""torchrun's own options: each is honored, accepted without effect, or refused with its sentence."""

from __future__ import annotations

from elasticd_agent.config.flag import Flag, Treatment, ValueType, both_spellings

TORCHRUN_FLAGS: tuple[Flag, ...] = (
    Flag(
        both_spellings("--nnodes"),
        ValueType.TEXT,
        "Nodes of the job, N or MIN:MAX. More than one meet by --rdzv-backend c10d or etcd, with --rdzv-endpoint and "
        "--rdzv-id; the job continues while MIN are left and grows up to MAX.",
        default="1:1",
        metavar="N",
    ),
    Flag(
        both_spellings("--nproc-per-node"),
        ValueType.TEXT,
        "Workers on this node: a number, gpu, cpu, auto, or MIN:MAX (ours): start with MAX, and while a slot keeps "
        "failing continue with fewer, down to MIN. gpu and auto count NVIDIA GPUs, subject to CUDA_VISIBLE_DEVICES; "
        "xpu and other accelerators are refused: give the number.",
        default="1",
        metavar="N",
    ),
    Flag(
        both_spellings("--rdzv-backend"),
        ValueType.TEXT,
        "Where nodes meet: c10d (torch's TCPStore, served by one of the agents) or etcd (v3, by its address). static "
        "is one node; with more it is refused, as its nodes could not be replaced. etcd-v2 and plug-ins are refused.",
        default="static",
        metavar="NAME",
    ),
    Flag(
        both_spellings("--rdzv-endpoint"),
        ValueType.TEXT,
        "c10d: HOST[:PORT] of the node that serves the store, port 29400 if none is given; one node without an "
        "endpoint, or with port 0, meets nobody. etcd: HOST[:PORT][,…], port 2379 if none is given; https:// in front "
        "means TLS. IPv6 in brackets. static: where the workers' store listens, as --master-addr and --master-port.",
        default="",
        metavar="HOST:PORT",
    ),
    Flag(
        both_spellings("--rdzv-id"),
        ValueType.TEXT,
        "The job's id, TORCHELASTIC_RUN_ID for the workers; none means a random one. (torchrun replaces it by a "
        "random one unless a backend or port is given.) Several nodes must be given the same one, or SLURM_JOB_ID.",
        default="none",
        metavar="ID",
    ),
    Flag(
        both_spellings("--rdzv-conf"),
        ValueType.TEXT,
        "Times in seconds: join_timeout (or timeout), last_call_timeout, keep_alive_interval and "
        "keep_alive_max_attempt (their product is the lease); ours: lease, renewal, store_timeout, seen_timeout, "
        "replace_timeout, hold_timeout, adopt_timeout, store_away, grow_debounce, node_cooloff. c10d: is_host. etcd: "
        "protocol, cacert, cert, key, user, password_file, password (or ELASTICD_ETCD_USER, ELASTICD_ETCD_PASSWORD). "
        "Without effect: close_timeout, read_timeout, heartbeat_timeout, use_libuv, rank. Other keys are refused.",
        default="",
        metavar="K=V,…",
    ),
    Flag(
        both_spellings("--standalone"),
        ValueType.SWITCH,
        "One node, a free port, a random job id; --rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored.",
        default=False,
    ),
    Flag(
        both_spellings("--max-restarts"),
        ValueType.INT,
        "Given: a hard total of restarts, as in torchrun. Not given: 3 in a row without progress (no new highest step, "
        "no new checkpoint) and --max-restarts-per-hour.",
        default_reason="torchrun's default is 0, no restarts at all; a supervisor that never restarts is of no use.",
        metavar="N",
    ),
    Flag(
        both_spellings("--monitor-interval"),
        ValueType.FLOAT,
        "The exit of a worker is an event; nothing is polled.",
        default=0.1,
        treatment=Treatment.NO_EFFECT,
        metavar="S",
    ),
    Flag(
        both_spellings("--start-method"),
        ValueType.TEXT,
        "Concerns Python functions, which torchrun's command line never starts either.",
        default="spawn",
        treatment=Treatment.NO_EFFECT,
        choices=("spawn", "fork", "forkserver"),
        metavar="NAME",
    ),
    Flag(
        both_spellings("--event-log-handler"),
        ValueType.TEXT,
        "torch's event handlers run inside torchrun's process; use --event-log FILE for one JSON object per event.",
        default="null",
        treatment=Treatment.REFUSED,
        metavar="NAME",
    ),
    Flag(
        both_spellings("--role"),
        ValueType.TEXT,
        "The workers' role, ROLE_NAME in their environment.",
        default="default",
        metavar="NAME",
    ),
    Flag(
        both_spellings("--module", "-m"),
        ValueType.SWITCH,
        "The script is a module's name, run as python -m does.",
        default=False,
    ),
    Flag(
        both_spellings("--no-python"),
        ValueType.SWITCH,
        "The script is a program, started as it is; not with -m.",
        default=False,
    ),
    Flag(
        both_spellings("--run-path"),
        ValueType.SWITCH,
        "Runs the script as a script: that is what runpy.run_path imitates. Overrides --no-python and -m.",
        default=False,
    ),
    Flag(
        both_spellings("--log-dir"),
        ValueType.TEXT,
        "Where worker logs go, in a directory per job, round and local rank; /dev/null keeps none.",
        metavar="DIR",
    ),
    Flag(
        both_spellings("--redirects", "-r"),
        ValueType.TEXT,
        "Which streams go to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or per "
        "local rank, 0:3,1:1.",
        default="0",
        metavar="STREAMS",
    ),
    Flag(
        both_spellings("--tee", "-t"),
        ValueType.TEXT,
        "Which streams go to log files and to the console; written as --redirects.",
        default="0",
        metavar="STREAMS",
    ),
    Flag(
        both_spellings("--local-ranks-filter"),
        ValueType.TEXT,
        "Local ranks whose output reaches the console, 0,1,2; the log files keep everything.",
        default="",
        metavar="RANKS",
    ),
    Flag(
        both_spellings("--duplicate-stdout-filters"),
        ValueType.LIST,
        "Stdout lines that contain one of these words go to filtered_stdout.log as well; ',,' is a comma in a word.",
        default=(),
        metavar="WORDS",
    ),
    Flag(
        both_spellings("--duplicate-stderr-filters"),
        ValueType.LIST,
        "Stderr lines that contain one of these words go to filtered_stderr.log as well; ',,' is a comma in a word.",
        default=(),
        metavar="WORDS",
    ),
    Flag(
        both_spellings("--node-rank"),
        ValueType.INT,
        "Static backend: the only node's rank is 0, another is refused. Otherwise, as in torchrun, nodes find their "
        "ranks by themselves.",
        default=0,
        metavar="N",
    ),
    Flag(
        both_spellings("--master-addr"),
        ValueType.TEXT,
        "With --master-port and the static backend: the address of this machine where the workers' store listens.",
        default="127.0.0.1",
        metavar="ADDR",
    ),
    Flag(
        both_spellings("--master-port"),
        ValueType.INT,
        "Static backend: the port of the workers' store, 0 for a free one; in use, it is an error. Not given: any.",
        metavar="PORT",
    ),
    Flag(
        both_spellings("--local-addr"),
        ValueType.TEXT,
        "The address of this machine for other nodes, a name or a literal; else that of the interface that reaches the "
        "store. Without effect on one node.",
        metavar="ADDR",
    ),
    Flag(
        both_spellings("--logs-specs"),
        ValueType.TEXT,
        "torch's log plug-ins run inside torchrun's process; --log-dir, --redirects and --tee say where logs go.",
        treatment=Treatment.REFUSED,
        metavar="NAME",
        env=False,
    ),
    Flag(
        both_spellings("--numa-binding"),
        ValueType.TEXT,
        "Workers are forked from one warm process, so no numactl can be put in front of each; bind the whole job "
        "(numactl … elasticd run …), or call os.sched_setaffinity in the script.",
        treatment=Treatment.REFUSED,
        choices=("node", "socket", "exclusive", "core-complex"),
        metavar="MODE",
        env=False,
    ),
    Flag(
        both_spellings("--signals-to-handle"),
        ValueType.TEXT,
        "Signals that stop the job when sent to elasticd; they are passed on to the workers.",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
    ),
    Flag(
        both_spellings("--shutdown-timeout"),
        ValueType.INT,
        "Seconds a stopped worker has before SIGKILL; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30. The survivors of a "
        "broken group get none: they can only wait for the dead.",
        metavar="S",
    ),
    Flag(
        both_spellings("--virtual-local-rank"),
        ValueType.SWITCH,
        "Every worker sees LOCAL_RANK=0 and its own GPU as device 0.",
        default=False,
    ),
)

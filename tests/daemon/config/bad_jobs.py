"""Job files in which something is wrong, and the line that says so.

What a parser says is its own, and other in other versions: `…` stands for the rest of such a sentence.
"""

from __future__ import annotations

ABOUT = 'command = ["train.py"]\nworkdir = "/tmp"\n'

TOML: list[tuple[str, str]] = [
    ("", 'command: is missing; write it, as in command = ["train.py", "--epochs", "3"]'),
    ('workdir = "/tmp"', 'command: is missing; write it, as in command = ["train.py", "--epochs", "3"]'),
    (
        'command = []\nworkdir="/tmp"',
        'command: is empty; write the script and its arguments, as in ["train.py", "--epochs", "3"]',
    ),
    (
        'command = [""]\nworkdir="/tmp"',
        'command: is empty; write the script and its arguments, as in ["train.py", "--epochs", "3"]',
    ),
    (
        'command = ["--epochs", "3", "train.py"]\nworkdir="/tmp"',
        "command: begins with '--epochs': the script's name comes first",
    ),
    (
        'command = "train.py"\nworkdir="/tmp"',
        'command: must be a list, not text; write it as in command = ["train.py", "--epochs", "3"]',
    ),
    ('command = ["a", 3]\nworkdir="/tmp"', "command[1]: must be text, not a whole number"),
    ('command = ["a"]', 'workdir: is missing; write it, as in workdir = "/home/me/project"'),
    ('command = ["a"]\nworkdir="project"', "workdir: 'project' is not an absolute path; begin it with /"),
    (
        'command = ["a"]\nworkdir="~/project"',
        "workdir: '~/project' is not an absolute path; write the home directory out",
    ),
    ('command = ["a"]\nworkdir=3', "workdir: 3 is not a path; write it as text, as in /srv/data"),
    ('command = ["a"]\nworkdir=""', "workdir: '' is not a path; write it as text, as in /srv/data"),
    (ABOUT + "limits = { cpu_weight = 0 }", "limits.cpu_weight: 0 must be from 1 to 10000"),
    (ABOUT + "limits = { ram = 1 }", "limits.ram: is not a key; there are memory, pids, cpu_weight"),
    (ABOUT + "worker = 4", "worker: is not a key; did you mean workers?"),
    (ABOUT + 'nnodes="2"', 'nnodes: is not a key here: write nodes, as in nodes = "2:8"'),
    (ABOUT + "nproc_per_node=2", 'nproc_per_node: is not a key here: write workers, as in workers = "1:8"'),
    (ABOUT + "nproc-per-node=2", 'nproc-per-node: is not a key here: write workers, as in workers = "1:8"'),
    (
        ABOUT + 'rdzv_conf="x"',
        "rdzv_conf: is not a key here: its times are keys by themselves, as in join_timeout and lease",
    ),
    (
        ABOUT + 'log_dir="/x"',
        "log_dir: is not a key here: the daemon keeps every worker's output; elasticd logs JOB --rank K shows it",
    ),
    (ABOUT + 'password="hunter2"', "password: is not a key; elasticd config example lists them"),
    (ABOUT + 'hang-floor="5s"', "hang-floor: is not a key; did you mean hang_floor?"),
    (ABOUT + "zzzz=1", "zzzz: is not a key; elasticd config example lists them"),
    (ABOUT + "workers = 0", "workers: 0: at least 1 is needed"),
    (ABOUT + 'workers="4:2"', "workers: 4:2: MIN 4 exceeds MAX 2; write 2:4"),
    (ABOUT + 'workers="gpu"', "workers: 'gpu' is neither a number nor MIN:MAX, as in 4 or 2:8"),
    (
        ABOUT + "workers=2.5",
        'workers: must be a whole number or text, not a number; write it as in workers = "1:8"',
    ),
    (ABOUT + "workers=-1", "workers: -1: at least 1 is needed"),
    (
        ABOUT + "workers=true",
        'workers: must be a whole number or text, not true or false; write it as in workers = "1:8"',
    ),
    (ABOUT + 'nodes="0:4"', "nodes: 0:4: at least 1 is needed"),
    (ABOUT + "nodes=1000000", "nodes: 1000000: at most 100000 are possible"),
    (ABOUT + 'workers="1:99999999999"', "workers: '1:99999999999': at most 100000 are possible"),
    (ABOUT + 'id = "-rf"', "id: '-rf' begins with '-': commands would take it for an option"),
    (
        ABOUT + "id = 'a;b'",
        "id: 'a;b' has characters that a shell or a URL reads otherwise; use letters, digits, '.', '_' and '-', and "
        "begin with a letter or a digit",
    ),
    (
        'command=["python","train.py"]\nworkdir="/tmp"',
        """command: begins with a script, not with 'python'; write: command = ["train.py"]""",
    ),
    (
        'command=["/v/bin/python3","-m","a.b","3"]\nworkdir="/tmp"',
        """command: begins with a script, not with '/v/bin/python3'; write: command = ["a.b", "3"], module = true""",
    ),
    (
        'command=["python3.11","-u","t.py"]\nworkdir="/tmp"',
        """command: begins with a script, not with 'python3.11'; write: command = ["python3.11", "-u", "t.py"], """
        "no_python = true",
    ),
    (ABOUT + 'nodes={count="0:4"}', "nodes: 0:4: at least 1 is needed"),
    (ABOUT + 'nodes="a"', "nodes: 'a' is neither a number nor MIN:MAX, as in 4 or 2:8"),
    (ABOUT + 'nodes="1:2:3"', "nodes: '1:2:3' is neither a number nor MIN:MAX, as in 4 or 2:8"),
    (ABOUT + "workers=99999999999999", "workers: 99999999999999: at most 100000 are possible"),
    (ABOUT + "max_restarts=-1", "max_restarts: -1: restarts cannot be negative; 0 means none"),
    (ABOUT + 'max_restarts="3"', "max_restarts: must be a whole number, not text"),
    (ABOUT + "max_restarts=3.5", "max_restarts: must be a whole number, not a number"),
    (ABOUT + "max_restarts_per_hour=0", "max_restarts_per_hour: 0 must be at least 1"),
    (ABOUT + "module=1", "module: must be true or false, not a whole number; write it as in module = false"),
    (ABOUT + 'module="true"', "module: must be true or false, not text; write it as in module = false"),
    (
        ABOUT + "module=true\nno_python=true",
        "no_python: and module contradict each other: a module needs Python to run it",
    ),
    (ABOUT + 'env=["A=b"]', 'env: must be a table, not a list; write it as in env = { OMP_NUM_THREADS = "4" }'),
    (ABOUT + "env={A=1}", 'env: must be text, not a whole number; write it as in env = { OMP_NUM_THREADS = "4" }'),
    (ABOUT + "env={A=true}", 'env: must be text, not true or false; write it as in env = { OMP_NUM_THREADS = "4" }'),
    (ABOUT + 'env={"A=B"="c"}', "env: 'A=B' cannot be the name of a variable"),
    (ABOUT + 'env={RANK="0"}', "env.RANK: is set by elasticd itself, for every worker; leave it out"),
    (
        ABOUT + 'env={CUDA_VISIBLE_DEVICES="0,1"}',
        "env.CUDA_VISIBLE_DEVICES: is set by the slots of the job; leave it out, or empty to hide all GPUs",
    ),
    (ABOUT + 'env={ELASTICD_JOB="x"}', "env.ELASTICD_JOB: is set by elasticd itself, for every worker; leave it out"),
    (ABOUT + 'env={""="x"}', "env: '' cannot be the name of a variable"),
    (
        ABOUT + "env={API_TOKEN=12345}",
        'env: must be text, not a whole number; write it as in env = { OMP_NUM_THREADS = "4" }',
    ),
    (ABOUT + 'user=""', "user: is empty; leave it out, or name it"),
    (ABOUT + 'python=""', "python: is empty; leave it out, or name it"),
    (ABOUT + "role=3", "role: must be text, not a whole number"),
    (ABOUT + 'id="a/b"', "id: 'a/b' must be printable, without '/', a leading '.' or spaces around it"),
    (ABOUT + 'id=""', "id: is empty; leave it out, or name it"),
    (ABOUT + 'id=".."', "id: '..' must be printable, without '/', a leading '.' or spaces around it"),
    (ABOUT + 'id="x y "', "id: 'x y ' must be printable, without '/', a leading '.' or spaces around it"),
    (ABOUT + 'id = "' + "x" * 200 + '"', "id: 'xxxxxxxxxxxxxxxx'… has 200 bytes; at most 128 fit"),
    (ABOUT + 'preload=["1a"]', "preload: '1a' is not a module's name as in pkg.module"),
    (ABOUT + 'preload="a"', 'preload: must be a list, not text; write it as in preload = ["transformers"]'),
    (ABOUT + 'preload=["a b"]', "preload: 'a b' is not a module's name as in pkg.module"),
    (ABOUT + 'grow="sometimes"', "grow: must be auto, always or never, not 'sometimes'"),
    (ABOUT + 'on_hang="kill"', "on_hang: must be restart or report, not 'kill'"),
    (ABOUT + "hang_factor=0.5", "hang_factor: 0.5 must be more than 1: it says how many times the usual is too long"),
    (ABOUT + "hang_factor=nan", "hang_factor: must be a number"),
    (ABOUT + "hang_factor=inf", "hang_factor: inf must be more than 1: it says how many times the usual is too long"),
    (ABOUT + "slow_factor=1", "slow_factor: 1 must be more than 1: it says how many times the usual is too long"),
    (
        ABOUT + 'hang_floor="5 parsecs"',
        "hang_floor: '5 parsecs' is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
    ),
    (ABOUT + "hang_floor=-3", "hang_floor: -3: a time cannot be negative"),
    (
        ABOUT + 'hang_floor="0.1s"',
        "hang_floor: 0.1 s must be at least 0.5 s, two looks at the workers, and at most a year",
    ),
    (
        ABOUT + 'hang_floor="2y"',
        "hang_floor: '2y' is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
    ),
    (
        ABOUT + "hang_floor=true",
        "hang_floor: true is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
    ),
    (ABOUT + 'hang_floor="500d"', "hang_floor: '500d' is longer than a year; at most 365d"),
    (ABOUT + "hang_floor=inf", "hang_floor: inf is longer than a year; at most 365d"),
    (
        ABOUT + 'hang_floor="1e3"',
        "hang_floor: '1e3' is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
    ),
    (ABOUT + 'shutdown_timeout="-3s"', "shutdown_timeout: '-3s': a time cannot be negative"),
    (
        ABOUT + 'hang_floor="10s"\nprogress_ceiling="5s"',
        "progress_ceiling: 5 s must not be less than hang_floor 10 s: it is the most a group may be "
        "quiet, the floor the least; raise it by 5 s",
    ),
    (
        ABOUT + 'slow_ceiling="3s"',
        "slow_ceiling: 3 s must exceed the least hang floor, 5 s, so that slow ranks have more time "
        "than idle ones; raise it by more than 2 s",
    ),
    (
        ABOUT + 'stopped_after="0.2s"',
        "stopped_after: 0.2 s must be at least 0.5 s, two looks at the workers, and at most a year",
    ),
    (ABOUT + "startup_ceiling=0", "startup_ceiling: 0 s must be more than 0 seconds"),
    (
        ABOUT + 'startup_ceiling="0.3s"',
        "startup_ceiling: 0.3 s must exceed user_error_wait 0.5 s, a part of it, so that "
        "an error of all ranks is seen as one; raise it by more than 0.2 s",
    ),
    (ABOUT + "first_step_ceiling=0", "first_step_ceiling: 0 s must be more than 0 seconds"),
    (
        ABOUT + 'lease="3s"\nrenewal="2s"\nstore_timeout="0.9s"',
        "lease: 3 s must exceed renewal 2 s + 2 × store_timeout 0.9 s, so that a renewal that fails "
        "can be tried once more; raise it by more than 0.8 s",
    ),
    (
        ABOUT + 'lease="0.5s"\nstore_timeout="1s"',
        "lease: 0.5 s must exceed renewal 0.166667 s + 2 × store_timeout 1 s, so that a renewal that "
        "fails can be tried once more; raise it by more than 1.66667 s",
    ),
    (ABOUT + "lease=0", "lease: 0 s must be more than 0 seconds"),
    (
        ABOUT + 'adopt_timeout="3s"',
        "adopt_timeout: 3 s must exceed lease 3 s + renewal 1 s, so that leases are judged again "
        "before any node counts as lost; raise it by more than 1 s",
    ),
    (
        ABOUT + 'store_away="1s"',
        "store_away: 1 s must exceed lease 3 s + renewal 1 s, so that leases are judged again before "
        "any node counts as lost; raise it by more than 3 s",
    ),
    (
        ABOUT + 'join_timeout="3s"\nlast_call_timeout="5s"',
        "join_timeout: 3 s must exceed last_call_timeout 5 s, a part of it, so that a job that has "
        "enough nodes begins; raise it by more than 2 s",
    ),
    (
        ABOUT + 'hold_timeout="1s"',
        "hold_timeout: 1 s must exceed grow_debounce 1 s + seen_timeout 1 s, so that the round that a "
        "group holds for can come; raise it by more than 1 s",
    ),
    (
        ABOUT + 'seen_timeout="0.5s"\nstore_timeout="0.9s"',
        "seen_timeout: 0.5 s must exceed store_timeout 0.9 s, so that a node that only waits for the "
        "store is not taken for dead; raise it by more than 0.4 s",
    ),
    (
        ABOUT + 'grow_debounce="40s"',
        "hold_timeout: 30 s must exceed grow_debounce 40 s + seen_timeout 1 s, so that the round that "
        "a group holds for can come; raise it by more than 11 s",
    ),
    (ABOUT + 'checkpoint_dir="ck"', "checkpoint_dir: 'ck' is not an absolute path; begin it with /"),
    (
        ABOUT + 'duplicate_stdout_filters="loss"',
        'duplicate_stdout_filters: must be a list, not text; write it as in duplicate_stdout_filters = ["loss"]',
    ),
    (ABOUT + "a.b=1", "a: is not a key; elasticd config example lists them"),
    (ABOUT + '[[job]]\nid="x"', "job: is not a key; elasticd config example lists them"),
    (ABOUT + 'id="a"\nid="b"', "is not TOML: a key is given twice (at end of document); keep one"),
    (ABOUT + "x = ", "is not TOML: …"),
    (ABOUT + "= 3", "is not TOML: …"),
    (ABOUT + 'id = "a\\u0000b"', "'a\\x00b' holds a zero byte, which no file name, argument or variable can"),
    (
        ABOUT + 'python="../bin/python"',
        "python: '../bin/python' is neither an absolute path nor a name on PATH; begin it with /",
    ),
    (ABOUT + "command.x=1", "is not TOML: …"),
    (
        ABOUT + "virtual_local_rank=0",
        "virtual_local_rank: must be true or false, not a whole number; write it as in virtual_local_rank = false",
    ),
    (ABOUT + "workdir2=1", "workdir2: is not a key; did you mean workdir?"),
    (ABOUT + 'role=""', "role: is empty; leave it out, or name it"),
    (ABOUT + 'role="a\\nb"', "role: 'a\\nb' holds a character that cannot be printed"),
    (ABOUT + 'id="a\\nb"', "id: 'a\\nb' holds a character that cannot be printed"),
    (ABOUT + 'zz""=1', "is not TOML: …"),
]
JSON: list[tuple[bytes, str]] = [
    (b"\xff", "is not text: byte 0 is not UTF-8"),
    (b'{"a":1,"a":2}', "a: is given twice; keep one"),
    (b"[1]", "must be a table of keys and values, not a list"),
    (b'{"a":NaN}', "NaN is not a number JSON knows"),
    (b'{"a":"\\ud800"}', "'\\ud800' holds half a character (a lone surrogate)"),
    (b'{"command":["a"],"workdir":"/tmp","id":1e999}', 'id: must be text, not a number; write it as in id = "llm-7b"'),
    (b"null", "must be a table of keys and values, not nothing"),
    (b"", "is not JSON: …"),
    (b'{"command":["a"],"workdir":"/tmp","\\ud800":1}', "'\\ud800' holds half a character (a lone surrogate)"),
]

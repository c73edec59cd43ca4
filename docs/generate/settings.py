"""docs/agent.md and docs/jobs.md, from the structs of agent.toml and of job files."""

from __future__ import annotations

from collections.abc import Iterator

from elasticd_daemon.config.load import variable_name
from elasticd_daemon.config.reference import agent_keys, job_keys


def agent_page() -> str:
    return AGENT.replace("@KEYS@", "\n".join(_agent_tables()))


def jobs_page() -> str:
    rows = [f"| `{key.key}` | {_cell(key.default)} | {_escape(key.help)} |" for key in job_keys()]
    return JOBS.replace("@KEYS@", "\n".join(["| key | default | what it does |", "|---|---|---|", *rows]))


def _agent_tables() -> Iterator[str]:
    table = None
    for key in agent_keys():
        outer, dot, name = key.key.rpartition(".")
        if table != outer:
            table = outer
            yield f"\n### [{outer}]\n" if dot else "### At the top\n"
            yield "| key | variable | default | SIGHUP | what it does |"
            yield "|---|---|---|---|---|"
        reload = "reloads" if key.reloadable else "restart"
        yield f"| `{name}` | `{variable_name(key.key)}` | {_cell(key.default)} | {reload} | {_escape(key.help)} |"


def _cell(text: str) -> str:
    return f"`{text}`" if text else "–"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


AGENT = """\
# agent.toml

<!-- Written by `make docs` from docs/generate/settings.py and agents/elasticd_agent/config/; a test compares. -->

`elasticd agent --config /etc/elasticd/agent.toml` reads this file once, at the start. [agent-life.md](agent-life.md)
describes what the agent does, why it exits and what survives it. Every key is optional: an empty file is a node that
works alone, with one slot per GPU (or CPU) and a local store. `examples/agent.toml` is a complete file, and
`elasticd config example` prints one with every key in it.

```
elasticd config check /etc/elasticd/agent.toml     # one line: nothing is wrong with it, or what is wrong
elasticd config check job.toml                     # job files as well
```

An error is one line on stderr and exit code 2, and nothing is started:

```
/etc/elasticd/agent.toml: store.endpoint: is not a key here: write endpoints = ["HOST:PORT"]
/etc/elasticd/agent.toml: lease: 3 s must exceed renewal 2 s + 2 × store_timeout 0.9 s, so that …; raise it by …
/etc/elasticd/agent.toml: http.token_file: '/etc/elasticd/token': anybody can read it (mode 0644); chmod 640 …
```

The check covers this machine. Files with secrets exist, and only their owner and group can read them (`root:elasticd`
0640 is the mode of mounted secrets in containers). Certificates belong to their keys, users exist, and `slots` does
not exceed the number of GPUs. The file itself must not be writable by everybody, as it can name commands. Run it as
the agent's user (`sudo -u elasticd`): root reads files that the agent cannot.

**Values.** A time is in seconds, or text with its unit: `0.5`, `"500ms"`, `"5s"`, `"2m"`, `"1.5h"`, `"7d"`. A size is
in bytes, or text: `"500MB"`, `"10GiB"`. Paths are absolute. The file may be JSON if its name ends so. A key given
twice is refused.

**Variables.** Every key can be set by a variable, which overrides the file: `ELASTICD_` and the key in
capitals, with its table in front, `ELASTICD_HTTP_PORT`. Lists are separated by commas. An empty variable counts as
unset. A variable that begins like one of the tables (`ELASTICD_STORE_…`) without being a key is refused. Secrets are
only ever in files: there is no variable for a password or a token. The variables that elasticd sets for workers
(`ELASTICD_JOB`, `ELASTICD_RUN`, `ELASTICD_ROUND` …) are never read here, and jobs do not see the agent's variables.

**SIGHUP** (`systemctl reload elasticd-agent`) reads the file and the variables of the agent's start again. After an
error the sentence is logged and nothing changes. Otherwise the keys marked *reloads* take effect at once. For each
other key that differs, one log line says that it takes effect at the next start: SIGUSR2, which replaces the agent
without disturbing a job, or `systemctl restart`, which drains the node. With another `node` or `state_dir` the agent
does not replace itself while jobs run: it would not find them.

## Keys

@KEYS@

## Limits

Anybody who may submit jobs can run code on every node. `[limits]` restricts that code. It is checked when a job is
submitted and again on each node that is about to run it. A node that refuses the job shows the reason, and the job is
scheduled elsewhere. All paths are resolved first, so that neither `..` nor a symbolic link leads out.

- `users`: the users that jobs may run as, including the user of jobs that name none. Without this list and without
  `user`, an agent that runs as root runs jobs as root.
- `directories`: where `workdir` and `checkpoint_dir` may be.
- `commands`: the scripts and programs that may be started. The script counts; an interpreter other than the agent's own
  must be in the list as well. With `module`, the module's file must be below `workdir`. Where commands are limited,
  `preload` is refused. So is every variable in `env` but those that are known to load no code: the usual settings of
  OMP, MKL, NCCL, CUDA, gloo and W&B, `LANG`, `TZ`, and `JOB_…` for the job's own. The list limits what is started,
  and not what that code does then; the modules that it imports should belong to another user than the one it runs as.

The check runs right before the job starts: anybody who can change links and files below an allowed directory is
trusted.
"""

JOBS = """\
# Job files

<!-- Written by `make docs` from docs/generate/settings.py and agents/elasticd_agent/config/; a test compares. -->

A job file holds the options of `elasticd run` for a job that is submitted to the agents: `elasticd submit job.toml`. It
is TOML or JSON. The smallest one:

```toml
command = ["train.py", "--epochs", "3"]
workdir = "/home/me/project"
```

`examples/job.toml` is a complete file, and `elasticd config example --job` prints one with every key in it.
`elasticd config check job.toml` checks it without an agent: an error is one line with the file, the key, the error and
its correction. `elasticd submit` makes the same checks first, and those of this node's `[limits]`. The checks are
those of `elasticd run` ([torchrun.md](torchrun.md)). Some facts are known on a node only: whether the
script is there, whether the user exists, whether the job may run there. Each node checks them when it is about to run
the job. A node that cannot run it shows the job as refused, with the reason, and the job is scheduled elsewhere. A
job that every node refuses blocks no other job, and has failed after `refuse_timeout` (60 s).

**Where it runs.** In `workdir`, as `user`, with the agent's environment without the agent's own variables (its
`ELASTICD_` and `PYTHON…` variables, systemd's), then `HOME` and the like of the user, then `env`. `PATH` and
`LD_LIBRARY_PATH` in `env` apply to the job alone. The user's shell profile is not read. Variables that elasticd sets
for workers (`RANK`, `MASTER_ADDR`, `ELASTICD_…`) are refused. Files that the job makes are its user's alone
(umask 077), unless the script calls `os.umask`.

**Which Python.** `python` may be the interpreter of any virtual environment that has torch: the warm launcher runs in
it without an installation of elasticd. Only a script with `import elasticd` needs elasticd there. A relative path is
not possible; a bare name is looked up on the job's `PATH`.

**How much.** `nodes` and `workers` (per node) are a number or MIN:MAX. The job is pending until MIN nodes have MIN free
slots each, in the order of submission. It then takes up to MAX and continues while MIN are left. Where slots are GPUs,
it sees its own GPUs only; `CUDA_VISIBLE_DEVICES = ""` in `env` hides all of them.

**What it leaves.** The agent keeps the output of every worker and the job's events for `keep_ended` after its end:
`elasticd logs JOB`, `elasticd explain JOB`. So a job file has no keys for logs, metrics or the rendezvous.

## Keys

@KEYS@
"""

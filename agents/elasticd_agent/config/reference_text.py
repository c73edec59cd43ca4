"""The prose of docs/agent.md and docs/jobs.md, around the tables that reference.py makes."""

from __future__ import annotations

AGENT_PAGE = """\
# agent.toml

<!-- Written by `make docs` from agents/elasticd_agent/daemon/; a test keeps it in step. -->

`elasticd agent --config /etc/elasticd/agent.toml` reads it once, at the start. [agent-life.md](agent-life.md) is about
what the agent does, dies of and survives. Every key may be left out: an empty file
is a node that works alone, with one slot per GPU (or CPU) and a local store. `examples/agent.toml` is a complete one,
`elasticd config example` prints one with every key in it.

```
elasticd config check /etc/elasticd/agent.toml     # what would count, or one line that says what is wrong
elasticd config check job.toml --json              # job files, too; a machine's answer
```

A mistake is one line on stderr and exit code 2, and nothing is started:

```
/etc/elasticd/agent.toml: store.endpoint: is not a key here: write endpoints = ["HOST:PORT"]
/etc/elasticd/agent.toml: lease: 3 s must exceed renewal 2 s + 2 × store_timeout 0.9 s, so that …; raise it by …
/etc/elasticd/agent.toml: http.token_file: '/etc/elasticd/token': anybody can read it (mode 0644); chmod 600 …
/etc/elasticd/agent.toml: job[1].workers: 8, but this node has 4 slot(s) and a local store knows no other
```

The check looks at this machine: files that hold secrets are there and nobody else's to read (their group may:
`root:elasticd` 0640, as mounted secrets in containers are made), certificates belong to their keys, users exist,
`slots` are not more than there are GPUs. The file itself must not be writable by everybody, as it can name commands.

**Values.** A time is seconds, or text with its unit: `0.5`, `"500ms"`, `"5s"`, `"2m"`, `"1.5h"`, `"7d"`. A size is
bytes or text: `"500MB"`, `"10GiB"`. Paths are absolute. The file may be YAML or JSON, if its name ends so. In YAML,
`2:8` needs no quotes and `no` is text (YAML 1.2); aliases and tags are refused. A key given twice is refused, too.

**Variables.** Every key but `[[job]]` can be set by a variable, which counts more than the file: `ELASTICD_` and the
key in capitals, with its table in front, `ELASTICD_HTTP_PORT`. Lists are separated by commas. An empty variable is as
if not set. A variable that begins like one of the tables (`ELASTICD_STORE_…`) but is no key is refused. Secrets are
only ever in files: there is no variable for a password or a token. What elasticd gives to workers (`ELASTICD_JOB`,
`ELASTICD_RUN`, `ELASTICD_ROUND` …) is something else and never read here, and jobs do not see the daemon's variables.

**Options.** `elasticd agent` takes `--bind`, `--port` and `--drain-timeout`, which count more than variables.

**SIGHUP** (`systemctl reload elasticd-agent`) reads the file and the variables it was started with again. If
something is wrong, the sentence is logged and nothing changes. Else the keys marked *reloads* count at once; for each
other key that differs, one log line says that it counts from the next start: SIGUSR2, by which the agent replaces
itself without disturbing a job, or `systemctl restart`, which drains the node. Of `[[job]]`, new ones are handed in;
one that is gone goes on, and `elasticd cancel` ends it.

## Keys

@KEYS@

### [[job]]

Jobs that this node hands in by itself, one table each, with the keys of a job file ([jobs.md](jobs.md)). Each needs an
`id`, so that it is handed in only once, and once more when it has ended and is written differently.

## Limits

Whoever may hand in jobs can run code on every node. `[limits]` says what that may be; it is asked when a job is handed
in and again on each node that shall run it, which then shows the job as refused and why, and the job is placed
elsewhere. All paths are resolved first, so that neither `..` nor a symbolic link leads out.

- `users`: who jobs may run as; also who they run as when they name nobody. Without this list and without `user`, a
  daemon that runs as root runs jobs as root.
- `directories`: where `workdir` and `checkpoint_dir` may be.
- `commands`: which scripts and programs may be started. The script counts, and an interpreter other than the daemon's
  own has to be in the list as well. With `module`, the module's file has to be below `workdir`. `preload`, and
  variables that make a command run other code (`PATH`, `LD_…`, `PYTHON…` …), are refused where commands are limited.
  The list limits what is started, not what it does then; what it imports should belong to somebody else than the user
  it runs as.

It is looked at right before the job starts: whoever may change links and files below an allowed directory is trusted.
"""

JOBS_PAGE = """\
# Job files

<!-- Written by `make docs` from agents/elasticd_agent/daemon/; a test keeps it in step. -->

A job file is what `elasticd run` is told on its command line, for jobs that are handed to the daemons:
`elasticd submit job.toml`. It is TOML, YAML or JSON. The smallest one:

```toml
command = ["train.py", "--epochs", "3"]
workdir = "/home/me/project"
```

`examples/job.toml` is a complete one, `elasticd config example --job` prints one with every key in it, and
`elasticd config check job.toml` says what would count, or what is wrong, in one line: file, key, what is wrong, what
would be right. It is judged by the checks of `elasticd run` itself ([torchrun.md](torchrun.md)). What only a node can
know (is the script there, does the user exist, may it run here) is looked at on the node that runs the job; one that
cannot is shown as refused, with the reason, and the job is placed elsewhere.

**Where it runs.** In `workdir`, as `user`, with the daemon's environment less what is the daemon's own (its `ELASTICD_`
and `PYTHON…` variables, systemd's), then `HOME` and the like of the user, then `env`. `PATH` and `LD_LIBRARY_PATH` in
`env` are the job's alone. Nothing is read from the user's shell profile. Variables that elasticd sets for workers
(`RANK`, `MASTER_ADDR`, `ELASTICD_…`) are refused.

**Which Python.** `python` may be that of any virtual environment that has torch: the warm launcher runs in it without
elasticd being installed there. Only a script that itself says `import elasticd` needs it there, too. A relative path is
not possible; a bare name is looked up on the job's `PATH`.

**How much.** `nodes` and `workers` (per node) are a number or MIN:MAX. The job waits until MIN nodes have MIN free
slots each, in the order in which jobs were handed in; it then takes up to MAX and goes on while MIN are left. Where
slots are GPUs, it sees its own GPUs only; `CUDA_VISIBLE_DEVICES = ""` in `env` hides them all.

**What it leaves.** The daemon keeps every worker's output and the job's events for `keep_ended` after its end:
`elasticd logs JOB`, `elasticd explain JOB`. So a job file has no keys for logs, metrics, or where nodes meet.

## Keys

@KEYS@
"""

"""docs/torchrun.md, from the tables of flags."""

from __future__ import annotations

from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Flag, ValueType
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS

HEAD = """\
# elasticd run and torchrun, option by option

<!-- Written by `make docs` from docs/generate/options.py and agents/elasticd_agent/config/*_flags.py. -->

Any script that runs under `torchrun` runs under `elasticd run`. Each of torchrun's options is honored, accepted without
effect, or refused with a sentence and exit code 2. Spellings with `_` for `-` and the abbreviations of torchrun are
accepted. The `PET_` variable of an option counts where the option is not given, as in torchrun; a switch is `1` or `0`.

`PYTHON_EXEC` names the interpreter, as in torchrun; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` stands in for
`--shutdown-timeout`. Two variables of torch's agent are honored as well:

- `TORCHELASTIC_ENABLE_FILE_TIMER=1`: workers, and processes that they start, set timers with torch's `FileTimerClient`
  at the path in `TORCHELASTIC_TIMER_FILE`, a named pipe that is made for the job unless the variable is given. A
  process that does not release a timer in time gets the timer's signal, SIGKILL by default. Then torchrun ends itself
  as well. Here the group is restarted as after any other death, and the log names the rank and the timer.
- `TORCHELASTIC_HEALTH_CHECK_PORT`: `/` and `/healthz` on this port, on all addresses, answer 200 while the agent works
  and 503 when it is stuck. A port that cannot be used is a line in the log. (The released torchrun reads the
  variable, and opens no port.)

## torchrun's options

| option | variable | default | | what it does here |
|---|---|---|---|---|
"""
OWN = """
## elasticd's own options

These cannot be abbreviated, so that torchrun's abbreviations keep their meaning. Only `--event-log` and `--run`,
written in full, are elasticd's and no longer short for `--event-log-handler` and `--run-path`. A TIME is in seconds, or
has a unit: `500ms`, `5s`, `2m`, `1.5h`, `1d`.

| option | default | what it does |
|---|---|---|
"""


def page() -> str:
    theirs = "\n".join(_row(flag, torchrun=True) for flag in TORCHRUN_FLAGS)
    return HEAD + theirs + "\n" + OWN + "\n".join(_row(flag, torchrun=False) for flag in ELASTICD_FLAGS) + "\n"


def _row(flag: Flag, *, torchrun: bool) -> str:
    names = ", ".join(f"`{name}`" for name in flag.spellings)
    switch = flag.value_type is ValueType.SWITCH
    default = "off" if switch else "–" if flag.default in (None, "", ()) else f"`{flag.default}`"
    text = " ".join(filter(None, (flag.help, flag.default_reason))).replace("|", "\\|")
    if not torchrun:
        return f"| {names} | {default} | {text} |"
    variable = f"`{flag.variable}`" if flag.variable else "–"
    return f"| {names} | {variable} | {default} | {flag.treatment.value} | {text} |"

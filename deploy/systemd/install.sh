#!/usr/bin/env bash
# Installs the elasticd agent as a systemd service, or upgrades it without interrupting a job. Safe to repeat.
#
#   install.sh [--prefix DIR] [--from WHAT] [--python PYTHON] [--no-start]
#
#   --prefix DIR      target (/opt/elasticd): a virtual environment in DIR/venv, two small scripts in DIR/libexec, a job to
#                     try in DIR/example; /usr/local/bin/elasticd links to it, and /usr/local/share has the man page
#   --from WHAT       source for pip: a wheel, a folder, a requirement (default: the checkout of this script)
#   --python PYTHON   an interpreter with elasticd; no virtual environment is created, pip is not run
#   --no-start        install everything, but neither start the agent nor replace a running one
#
# pip reads its own variables: PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, PIP_CONSTRAINT. /etc/elasticd is kept.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

prefix=/opt/elasticd python='' from='' start=yes
say() { echo "install.sh: $*"; }
refuse() { echo "install.sh: error: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --prefix | --from | --python)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            declare "${1#--}=$2"
            shift
            ;;
        --no-start) start=no ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) refuse "unknown option $1; there are --prefix, --from, --python and --no-start" ;;
    esac
    shift
done
[[ $prefix = /* ]] || refuse "--prefix $prefix: an absolute path is needed, one that begins with /"
[[ -z $python || $python = /* ]] || refuse "--python $python: an absolute path is needed, one that begins with /"
[[ $prefix$python != *[[:space:]\|%\&]* ]] || refuse "a unit file does not support paths with spaces, |, & or %"
[ "$(id -u)" = 0 ] || refuse "needs root: it creates a user and a system service"
command -v systemctl >/dev/null || refuse "systemctl not found; without systemd run: elasticd agent --supervised"
version=$(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
[ "$version" -ge 246 ] || refuse "systemd $version is too old: the unit needs 246 (TimeoutStartFailureMode=) or newer"

umask 022 # a hardened root's own would close the program to the user elasticd

# --- the user that runs jobs and owns their checkpoints ----------------------------------------------------------------
getent group elasticd >/dev/null || groupadd --system elasticd
getent passwd elasticd >/dev/null || useradd --system --gid elasticd --home-dir /var/lib/elasticd --no-create-home \
    --shell "$(command -v nologin || echo /usr/sbin/nologin)" --comment "elasticd agent and its jobs" elasticd
for group in video render; do # access to GPUs, where the driver's files are restricted
    if getent group "$group" >/dev/null; then usermod --append --groups "$group" elasticd; fi
done

# --- the program ------------------------------------------------------------------------------------------------------
if [ -z "$python" ]; then
    python=$prefix/venv/bin/python
    if [ -z "$from" ]; then
        from=$here/../..
        [ -e "$from/pyproject.toml" ] || refuse "this script is in no checkout: name what to install, --from WHAT"
    fi
    if [ ! -x "$python" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            refuse "python3 is older than 3.10: make an environment of a newer one that has elasticd, and use --python"
        python3 -m venv "$prefix/venv" || refuse "no virtual environment (Debian: apt install python3-venv)"
    fi
    say "pip installs $from into $prefix/venv"
    # All that it depends on but torch, which is installed with it, from the index in pip's variables, unless it is there.
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$here/../requirements.txt"
    # What builds the wheel comes with hashes, too; in isolation pip would install it without.
    build=()
    if [ -e "$from/pyproject.toml" ]; then
        "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$here/../build-requirements.txt"
        build=(--no-build-isolation)
    fi
    # A folder's version may not change with its content; without this a second install of it would do nothing.
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade "${build[@]}" "$from"
    case $from in */*) "$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "${build[@]}" "$from" ;; esac
fi
as_elasticd() { (cd / && setpriv --reuid=elasticd --regid=elasticd --init-groups "$@"); }
installed=$(as_elasticd "$python" -m elasticd_agent --version) ||
    refuse "$python does not run elasticd as the user elasticd; is every folder above it accessible (chmod o+x)?"
say "$installed"

install -d -m 0755 "$prefix/libexec"
for script in elasticd-end-left elasticd-devices; do
    install -m 0755 "$here/$script" "$prefix/libexec/$script"
done

# On PATH, and for sudo; another elasticd that is there already, such as pipx's, is kept.
link=/usr/local/bin/elasticd program=${python%/*}/elasticd
if [ ! -x "$program" ]; then
    say "$program does not exist: the command is $python -m elasticd_agent"
elif [ ! -e "$link" ] && [ ! -L "$link" ] || [ "$(readlink "$link")" = "$program" ]; then
    install -d -m 0755 /usr/local/bin
    ln -sfn "$program" "$link"
    share=/usr/local/share
    manual=${python%/*}/../share/man/man1/elasticd.1
    [ ! -e "$manual" ] || install -D -m 0644 "$manual" "$share/man/man1/elasticd.1"
else
    say "$link is another elasticd: use $program"
fi

example=$prefix/example
if [ -e "$here/../../examples/train_lm.py" ]; then
    install -d -m 0755 "$example"
    install -m 0644 "$here/../../examples/train_lm.py" "$example/train_lm.py"
    sed "s|/opt/elasticd|$prefix|" "$here/example-job.toml" >"$example/job.toml"
    chmod 0644 "$example/job.toml"
fi

# --- its configuration ------------------------------------------------------------------------------------------------
install -d -o root -g elasticd -m 0750 /etc/elasticd
install -d -o root -g elasticd -m 0750 /etc/elasticd/health.d
if [ ! -e /etc/elasticd/agent.toml ]; then
    install -o root -g elasticd -m 0640 "$here/agent.toml" /etc/elasticd/agent.toml
    say "wrote /etc/elasticd/agent.toml"
fi
# For browsers and other nodes. Not the agent's own file: jobs run as elasticd and must not be able to change it.
if [ ! -e /etc/elasticd/token ]; then
    "$python" -c 'import secrets; print(secrets.token_hex(32))' |
        install -o root -g elasticd -m 0640 /dev/stdin /etc/elasticd/token
    say "wrote /etc/elasticd/token; all nodes of a cluster need the same one"
fi
settings=() # those that the unit takes from agent.env, and that agent.toml may lack
while IFS= read -r line; do
    if [[ $line =~ ^([A-Z_]+)=[\"\']?(.*[^\"\'])[\"\']?$ ]]; then settings+=("${BASH_REMATCH[1]}=${BASH_REMATCH[2]}"); fi
done < <(grep -s '^ELASTICD_' /etc/elasticd/agent.env)
as_elasticd env "${settings[@]}" "$python" -m elasticd_agent config check /etc/elasticd/agent.toml >/dev/null ||
    refuse "/etc/elasticd/agent.toml is wrong; the service was not changed"

# --- the service ------------------------------------------------------------------------------------------------------
reload=()
# From 253 on `systemctl reload` waits until the agent has read its configuration.
[ "$version" -lt 253 ] || reload=(-e 's/^Type=notify$/Type=notify-reload/' -e '/^ExecReload=/d')
unit=$(sed -e "s|/opt/elasticd/venv/bin/python|$python|" -e "s|/opt/elasticd|$prefix|" "${reload[@]}" "$here/elasticd-agent.service")
printf '%s\n' "$unit" >/etc/systemd/system/elasticd-agent.service
chmod 0644 /etc/systemd/system/elasticd-agent.service
systemctl daemon-reload
systemctl --quiet enable elasticd-agent.service

if [ "$start" = no ]; then
    say "start it with: systemctl start elasticd-agent"
elif ! systemctl --quiet is-active elasticd-agent.service; then
    systemctl start elasticd-agent.service
    say "started. Next:"
    printf '    sudo elasticd %-45s # %s\n' nodes "this node and its slots" \
        "submit $example/job.toml" "a small job to try" open "a URL of the dashboard, logged in"
else
    # The agent replaces itself by the new program, in the same process, without any effect on its runners.
    kill -USR2 "$(systemctl show --property=MainPID --value elasticd-agent.service)"
    say "the running agent replaces itself, and jobs continue; see journalctl -u elasticd-agent"
    say "changes of the unit itself apply from the next start"
fi

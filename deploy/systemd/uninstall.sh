#!/usr/bin/env bash
# Removes the elasticd agent's service: uninstall.sh [--prefix DIR] [--purge]
#
# It stops the agent first, which drains its jobs (checkpoint, then leave). Configuration, state (/var/lib/elasticd: jobs'
# logs and records) and the user stay, unless --purge is given. Checkpoints elsewhere are never touched.
set -euo pipefail

prefix=/opt/elasticd purge=no
refuse() { echo "uninstall.sh: error: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --prefix)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            prefix=$2
            shift
            ;;
        --purge) purge=yes ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) refuse "unknown option $1; there are --prefix and --purge" ;;
    esac
    shift
done
[[ $prefix = /?* ]] || refuse "--prefix $prefix: an absolute path is needed, one that begins with /"
[ "$(id -u)" = 0 ] || refuse "needs root"

unit=/etc/systemd/system/elasticd-agent.service
if [ -e "$unit" ]; then
    python=$(sed -n 's/^ExecStart=\([^ ]*\) .*/\1/p' "$unit")
    if [ "$(readlink /usr/local/bin/elasticd)" = "${python%/*}/elasticd" ]; then
        (cd /usr/local && rm -f bin/elasticd share/bash-completion/completions/elasticd share/zsh/site-functions/_elasticd \
            share/fish/vendor_completions.d/elasticd.fish share/man/man1/elasticd.1)
    fi
    systemctl --quiet disable --now elasticd-agent.service
    rm -f "$unit"
    systemctl daemon-reload
    systemctl reset-failed elasticd-agent.service 2>/dev/null || true # nothing to reset is no error
fi
# Only the files of install.sh, by name: a prefix may contain others.
rm -rf "$prefix/venv" "$prefix/example/train_lm.py" "$prefix/example/job.toml" "$prefix/libexec/elasticd-end-left" "$prefix/libexec/elasticd-devices"
rmdir --ignore-fail-on-non-empty "$prefix/libexec" "$prefix/example" "$prefix" 2>/dev/null || true

if [ "$purge" = yes ]; then
    rm -rf /etc/elasticd /var/lib/elasticd /run/elasticd /etc/systemd/system/elasticd-agent.service.d
    if getent passwd elasticd >/dev/null; then userdel elasticd; fi
    if getent group elasticd >/dev/null; then groupdel elasticd; fi
    systemctl daemon-reload
fi
echo "uninstall.sh: done"

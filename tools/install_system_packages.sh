#!/bin/sh
# Installs what the build can use from the system, where it may; everything here is optional.
set -u

missing=""
command -v g++ >/dev/null || missing="$missing g++"
pkg-config --exists liburing 2>/dev/null || missing="$missing liburing-dev pkg-config"
command -v tmux >/dev/null || missing="$missing tmux"
python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -n "$missing" ] || exit 0

run=""
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "note: without root, going on without:$missing"
        exit 0
    fi
    run="sudo -n"
fi
if ! command -v apt-get >/dev/null; then
    echo "note: no apt-get here, going on without:$missing"
    exit 0
fi
echo "installing:$missing"
$run apt-get update -qq >/dev/null 2>&1
# shellcheck disable=SC2086  (a list of words on purpose)
DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq $missing >/dev/null 2>&1 ||
    echo "note: apt-get failed, going on without:$missing"

#!/bin/sh
# Installs a wheel where no compiler is in reach, and trains with it.
#
#   tools/try_wheel.sh PYTHON WHEEL
set -eu
here=$(dirname "$(realpath "$0")")
python=$(command -v "$1")
wheel=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
mkdir "$work/tools"
for tool in sh mktemp rm cat mkdir ls; do
    ln -s "$(command -v $tool)" "$work/tools/"
done
path=$work/venv/bin:$work/tools
pip() { env PATH="$path" "$work/venv/bin/python" -m pip install -q --disable-pip-version-check --only-binary :all: "$@"; }
pip "${TORCH:-torch}"
pip "$wheel[train]"
env -i HOME="$work" PATH="$path" "$here/try_installed.sh"

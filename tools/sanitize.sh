#!/bin/sh
# Stresses the I/O engines and the optimizer's kernels under AddressSanitizer with UBSan, then under ThreadSanitizer.
set -eu
cmake="$(command -v cmake || echo .venv/bin/cmake)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
for sanitizer in address,undefined thread; do
    build="build/sanitize-${sanitizer%%,*}"
    "$cmake" -S tests/native -B "$build" -DSANITIZE="$sanitizer" >/dev/null
    "$cmake" --build "$build" --parallel 2 >/dev/null
    echo "== $sanitizer"
    # The kernel's side of a ring is not seen by ThreadSanitizer; what our threads share is.
    UBSAN_OPTIONS=halt_on_error=1 TSAN_OPTIONS=halt_on_error=1 "$build/aio_stress" "$scratch"
    UBSAN_OPTIONS=halt_on_error=1 TSAN_OPTIONS=halt_on_error=1 "$build/adam_stress"
done

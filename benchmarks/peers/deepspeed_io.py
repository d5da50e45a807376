"""DeepSpeed's async_io as a worker: reads one JSON job a line, answers with one JSON line.

Its buffer is as large as the file, so that each pass is a single call: the best case for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever it logs must not look like an answer

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

aio = AsyncIOBuilder().load()


def run(job: dict[str, Any], buffer: torch.Tensor) -> dict[str, Any]:
    path, size = job["path"], buffer.numel()
    half = size // 2
    # Reads and writes at the same time need a handle each, but then two blocks are in flight at depth 1.
    handles = [aio.aio_handle(job["block"], job["depth"], False, True, job["threads"])]
    if job["depth"] > 1:
        handles.append(aio.aio_handle(job["block"], job["depth"], False, True, job["threads"]))
    cpu_s, start_s = time.process_time(), time.perf_counter()
    if job["operation"] == "mixed":
        handles[0].async_pread(buffer[:half], path, 0)
        handles[-1].async_pwrite(buffer[half:], path, half)
        for handle in handles:
            handle.wait()
    elif job["operation"] == "read":
        handles[0].async_pread(buffer, path, 0)
        handles[0].wait()
    else:
        handles[0].async_pwrite(buffer, path, 0)
        handles[0].wait()
    return {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s, "nbytes": size}


def main() -> None:
    handle = aio.aio_handle(1 << 20, 32, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(int(sys.argv[1]), torch.empty(0, dtype=torch.uint8))
    buffer.random_()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), buffer)), file=answers, flush=True)


main()

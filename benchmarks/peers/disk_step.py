"""Worker of train_step.py: no training, but the rate of the drive in the same minute."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.disk import disk_bytes_per_s
from benchmarks.workload import arguments

print("RESULT " + json.dumps({"bytes_per_s": disk_bytes_per_s(arguments().parse_args().nvme)}), flush=True)

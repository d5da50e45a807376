"""Run a script as it is, as one rank of several on a machine without a GPU: `as_rank.py SCRIPT ...`.

accelerate counts one process there unless somebody names the backend, so this does.
"""

import os
import runpy
import sys
from typing import Any

from accelerate import PartialState

if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    plain = PartialState.__init__

    def with_backend(self: PartialState, cpu: bool = False, **more: Any) -> None:
        plain(self, cpu, **({"backend": "gloo"} | more))

    PartialState.__init__ = with_backend
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

"""`deepspeed.git_version_info`: the versions of infinity and of torch."""

from __future__ import annotations

import torch

from infinity import __version__

git_hash = git_branch = f"infinity {__version__}"
# The versions of the imported torch, because nothing was built against another one; "0.0" for missing parts.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}

"""`deepspeed.git_version_info`: what this is, and the torch that it runs with."""

from __future__ import annotations

import torch

from infinity import __version__

git_hash = git_branch = f"infinity {__version__}"
# Of the torch that is imported, since nothing was built against another; "0.0" for what it has not.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}

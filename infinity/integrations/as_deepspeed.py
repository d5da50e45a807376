"""`install()`: have `import deepspeed` give infinity's in this process."""

from __future__ import annotations

from infinity.integrations.deepspeed.installation import FOLDER, install

__all__ = ["FOLDER", "install"]

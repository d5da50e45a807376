from __future__ import annotations

from collections.abc import Iterator

import pytest

from infinity import kernels


@pytest.fixture(autouse=True)
def _restore_machine_settings() -> Iterator[None]:
    """Tests change the instruction set and the number of threads; nothing else should notice."""
    instruction_set, threads = kernels.active_instruction_set(), kernels.thread_count()
    yield
    kernels.use_instruction_set(instruction_set)
    kernels.set_threads(threads)

from torch.compiler import is_compiling

__all__ = ["is_compile_supported", "is_compiling"]


def is_compile_supported() -> bool:
    """torch has it."""
    return True

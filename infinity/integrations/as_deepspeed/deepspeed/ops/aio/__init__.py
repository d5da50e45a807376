from infinity.integrations.deepspeed.builders import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

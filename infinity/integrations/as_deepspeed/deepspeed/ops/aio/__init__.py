from infinity.integrations.dialect.builders import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

from infinity.integrations.dialect.logs import see_memory_usage

__all__ = ["see_memory_usage"]

from infinity.integrations.dialect.data import RepeatingLoader

__all__ = ["RepeatingLoader"]

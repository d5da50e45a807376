from infinity.integrations.dialect.logs import log_dist, logger

__all__ = ["log_dist", "logger"]

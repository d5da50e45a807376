from infinity.integrations.dialect.logs import log_dist, logger, print_dist, warning_once

__all__ = ["log_dist", "logger", "print_dist", "warning_once"]

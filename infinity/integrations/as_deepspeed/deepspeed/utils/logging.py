from infinity.integrations.deepspeed.logs import log_dist, logger, print_dist, set_log_level_from_string, warning_once

__all__ = ["log_dist", "logger", "print_dist", "set_log_level_from_string", "warning_once"]

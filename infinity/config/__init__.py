"""Read, check and resolve the configuration (a JSON file or a mapping)."""

from infinity.config.edit import edited
from infinity.config.load import load_config, with_values
from infinity.config.paths import check_apart, expanded_path
from infinity.config.read import read_json, write_json
from infinity.config.resolve import default_tile_bytes
from infinity.config.resolved import (
    AioConfig,
    Config,
    Fp16Config,
    LeafModules,
    MonitorConfig,
    NvmeConfig,
    OffloadConfig,
    OptimizerConfig,
    Precision,
    SchedulerConfig,
    TieringConfig,
    WandbConfig,
    ZeroConfig,
)
from infinity.config.sizes import format_size, named_size, parse_size, size_to_set

__all__ = [
    "AioConfig",
    "Config",
    "Fp16Config",
    "MonitorConfig",
    "NvmeConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "Precision",
    "SchedulerConfig",
    "TieringConfig",
    "WandbConfig",
    "LeafModules",
    "ZeroConfig",
    "check_apart",
    "default_tile_bytes",
    "edited",
    "format_size",
    "load_config",
    "expanded_path",
    "named_size",
    "parse_size",
    "size_to_set",
    "read_json",
    "with_values",
    "write_json",
]

from infinity.integrations.deepspeed.refused import refused
from infinity.integrations.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

get_model_state_file, get_optim_files = refused("get_model_state_file"), refused("get_optim_files")

if __name__ == "__main__":
    main()

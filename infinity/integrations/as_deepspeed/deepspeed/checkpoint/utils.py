from infinity.integrations.deepspeed.data import clone_tensors_for_torch_save
from infinity.integrations.deepspeed.refused import refused

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]

get_model_ckpt_name_for_rank = refused("get_model_ckpt_name_for_rank")

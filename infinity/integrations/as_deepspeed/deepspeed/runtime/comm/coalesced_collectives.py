from infinity.integrations.deepspeed.comm import reduce_scatter_coalesced

__all__ = ["reduce_scatter_coalesced"]

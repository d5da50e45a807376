from infinity.integrations.deepspeed.refused import refused_class
from infinity.zero.tiling import TiledLinear

__all__ = ["TiledLinear", "TiledLinearReturnBias"]

TiledLinearReturnBias = refused_class("TiledLinearReturnBias")

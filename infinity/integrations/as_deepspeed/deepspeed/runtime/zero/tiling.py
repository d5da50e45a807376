from infinity.zero.tiling import TiledLinear

__all__ = ["TiledLinear"]

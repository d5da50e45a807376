from infinity.integrations.deepspeed.refused import refused, refused_class

__all__ = ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"]

LinearFunctionForZeroStage3 = refused_class("LinearFunctionForZeroStage3")
LinearModuleForZeroStage3 = refused_class("LinearModuleForZeroStage3")
zero3_linear_wrap = refused("zero3_linear_wrap")

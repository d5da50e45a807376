from infinity.integrations.deepspeed.refused import refused, refused_class

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile", "LossScaler"]

DynamicLossScaler = refused_class("DynamicLossScaler")
LossScaleConfig = refused_class("LossScaleConfig")
LossScaleProfile = refused_class("LossScaleProfile")
LossScaler = refused_class("LossScaler")
CreateLossScaler = refused("CreateLossScaler")

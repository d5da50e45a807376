from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

LayerSpec = refused_class("LayerSpec")
PipelineModule = refused_class("PipelineModule")
TiedLayerSpec = refused_class("TiedLayerSpec")

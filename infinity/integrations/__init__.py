"""Other libraries' models in infinity's engine."""

from infinity.integrations.pretrained import from_pretrained, pretrained_model

__all__ = ["from_pretrained", "pretrained_model"]

"""Executing forms. The torch reference is the source of truth."""

from kvbridge.kernels.execute import FormMap

__all__ = ["FormMap"]

"""Optimizers that scale each step by norms of whole parameters, however these are divided."""

from lightning_parallel.optim.trust_ratios import LAMB, LARS, TrustRatioOptimizer
from lightning_parallel.optim.whole_norms import WholeNorms

__all__ = ["LAMB", "LARS", "TrustRatioOptimizer", "WholeNorms"]

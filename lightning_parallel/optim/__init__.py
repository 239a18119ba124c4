"""Optimizers that scale each step by norms of full parameters, also where the parameters are sharded."""

from lightning_parallel.optim.trust_ratios import LAMB, LARS, TrustRatioOptimizer, WholeNorms

__all__ = ["LAMB", "LARS", "TrustRatioOptimizer", "WholeNorms"]

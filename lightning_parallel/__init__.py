"""Tensor, pipeline and data parallelism, gradient compression and profiling for PyTorch Lightning."""

__version__ = "0.1.0"

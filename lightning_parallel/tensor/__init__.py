"""Tensor parallelism: one layer over several ranks."""

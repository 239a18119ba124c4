"""Optimizers on shards, stages and slices: checks, norms, ZeRO."""

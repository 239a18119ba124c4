"""Commands of `lightning-parallel`. `lightning_parallel_cli` has their arguments, so that `--help` imports no torch."""

from lightning_parallel_cli import main

__all__ = ["main"]

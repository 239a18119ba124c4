"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` says which one an update has moved.
"""

from __future__ import annotations

__all__: list[str] = []

# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------

# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# -- torch.distributed: stores, groups, flight recorder ----------------------------------------------------------------

# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- torch.amp, torch.optim --------------------------------------------------------------------------------------------

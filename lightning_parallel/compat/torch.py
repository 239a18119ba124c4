"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` says which one an update has moved.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

__all__ = ["default_store", "parameters_of"]

# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which `module` keeps its own parameters, to be changed in place.

    `named_parameters` gives copies of it; `register_parameter` and `delattr` cannot keep the order of the others.
    """
    return module._parameters


# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# -- torch.distributed: stores, groups, flight recorder ----------------------------------------------------------------


def default_store() -> dist.Store:
    """Return the rendezvous store of the default process group.

    No public function does, and with `init_method="env://"` torch creates the store by itself.
    """
    return dist.distributed_c10d._get_default_store()


# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- torch.amp, torch.optim --------------------------------------------------------------------------------------------

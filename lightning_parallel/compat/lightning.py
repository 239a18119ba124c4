"""Private names of Lightning and torchmetrics that the library cannot do without, each with the reason."""

from __future__ import annotations

__all__: list[str] = []

# -- strategies: launching, processes ----------------------------------------------------------------------------------

# -- strategies: DDP, FSDP ---------------------------------------------------------------------------------------------

# -- loops and connectors ----------------------------------------------------------------------------------------------

# -- loggers, callbacks, profiler --------------------------------------------------------------------------------------

# -- torchmetrics ------------------------------------------------------------------------------------------------------

"""Counts what a step costs a device besides arithmetic, on a CPU, where every operation is seen."""

from collections import Counter

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# A tensor that is made from numbers of Python is copied to its device, for which the host waits.
WAITS = {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"}
READS = {"cpu", "tolist", "numpy", "__array__"}


class Launches(TorchDispatchMode):
    """Counts operations that launch kernels, and those for which the host waits."""

    def __init__(self):
        super().__init__()
        self.launched, self.waited = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not getattr(func, "is_view", False) and "empty" not in name:
            self.launched[name] += 1
            unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
            self.waited[name] += name in WAITS or unsized
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts the reads of values that are not dispatched on a CPU."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.seen.waited[name] += name in READS
        return func(*args, **(kwargs or {}))

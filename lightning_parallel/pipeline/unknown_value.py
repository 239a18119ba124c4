"""Numbers that a module of another stage computes from its data, such as `x.mean().item()`: they refuse to be used."""

from __future__ import annotations

from typing import Any

from lightning_parallel.compat.torch import pytree
from lightning_parallel.pipeline.placeholder import PlaceholderError, missing

__all__ = ["UnknownValue", "require_known"]


class UnknownValue:
    """A Python or numpy value that a module of another stage computed from its data, as by `tensor.item()`.

    It can be passed on and returned; any use of it raises `PlaceholderError`.

    Args:
        sample: The value for random data, for modules that run on random data.
        provenance: The module that computed it, for the message.
        available: As for `PlaceholderTensor`.

    Attributes:
        sources: Empty, unlike a placeholder's: only tensors are sent.
    """

    def __init__(self, sample: Any, provenance: str, available: bool) -> None:
        self.__dict__.update(sample=sample, provenance=provenance, available=available, sources=frozenset())

    def __repr__(self) -> str:
        return f"UnknownValue({type(self.sample).__name__} of {self.provenance})"

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Raise a `PlaceholderError` that names the value."""
        kind = type(self.sample).__name__
        error = PlaceholderError(
            f"{self.provenance} leaves a value of type {kind} that is computed from its data, as by `.item()`. The"
            " step uses this value on a pipeline stage that does not hold the module. A pipeline sends only tensors"
            " between layers: keep it a tensor and pass it through the layers, or do not use it"
        )
        error.is_missing = not self.available
        raise error

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for methods that may be absent; any other access would be a use of the value.
        if name.startswith("__") and name.endswith("__") and name not in ("__array__", "__array_interface__"):
            raise AttributeError(name)
        return self.refuse()


_REFUSED = (
    "add sub mul truediv floordiv mod divmod pow matmul radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul "
    "and or xor rand ror rxor lshift rshift neg pos abs invert lt le gt ge eq ne bool int float complex index round "
    "trunc floor ceil len iter next contains getitem setitem format str hash array call"
)
for _operation in _REFUSED.split():
    # Special methods are looked up on the class. numpy and torch ask for `__array__`, `__float__` or `__index__`.
    setattr(UnknownValue, f"__{_operation}__", UnknownValue.refuse)


def require_known(value: Any, name: str) -> None:
    """Refuse placeholders, and numbers of other stages, in a value that a step leaves behind.

    Args:
        value: A value of any structure.
        name: Where the step leaves it, for the message.

    Raises:
        PlaceholderError: If there is one.
    """
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, UnknownValue) or missing(leaf):
            raise PlaceholderError(
                f"{name} is made of {leaf.provenance}, which is on an earlier pipeline stage. The last stage, where a "
                "step ends, does not know this value. Make it of the outputs of the layers, or pass it through the "
                "layers"
                " [LP024]",
                [leaf],
            )

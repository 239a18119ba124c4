"""The contract with the dependencies: every private name that the library uses is there, with the expected signature."""

import weakref

import pytest
import torch
from torch import nn

from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat import torch as compat_torch


class _Target:
    value = 1

    def method(self):
        return "method"


def test_a_patch_is_undone_and_leaves_nothing_in_the_object():
    target = _Target()
    with patched(target, "method", lambda: "patched") as before:
        assert target.method() == "patched"
        assert before() == "method"
    assert target.method() == "method"
    assert "method" not in vars(target)


def test_patches_are_undone_last_first():
    target = _Target()
    patches = Patches()
    patches.replace(_Target, "value", 2)
    patches.replace(_Target, "value", 3)
    patches.replace(target, "value", 4)
    patches.undo()
    assert (_Target.value, target.value) == (1, 1)
    assert not vars(target)


# -- used by strategies.deferred_init -----


class _ClaimsDevice(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.prim.device.default
        return torch.device("cpu")


def test_a_meta_tensor_can_claim_a_device_and_shares_its_storage():
    plain = torch.empty(4, device="meta")
    plain.untyped_storage().mark = "kept with the storage"
    tensor = compat_torch.make_subclass(
        _ClaimsDevice, plain, False, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
    )
    assert type(tensor) is _ClaimsDevice
    assert tensor.device.type == "cpu"
    del plain
    with compat_torch.DisableTorchFunctionSubclass():
        assert tensor.untyped_storage().mark == "kept with the storage"


def test_tensors_exchange_what_they_stand_for_despite_weak_references():
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    reference = weakref.ref(parameter)
    parameter.mark = True
    compat_torch.swap_tensor_impl(parameter, other)
    assert reference() is parameter
    assert parameter.shape == (3,)
    assert parameter.mark


def test_data_access_can_be_forbidden():
    tensor = torch.empty(2, device="meta")
    compat_torch.forbid_data_access(tensor)
    with pytest.raises(RuntimeError, match="data pointer"):
        tensor.data_ptr()


def test_gradient_hooks_move():
    source, target = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen = []
    source.register_hook(lambda grad: grad * 3)
    source.register_post_accumulate_grad_hook(seen.append)
    compat_torch.move_tensor_hooks(source, target)
    target.sum().backward()
    assert target.grad.item() == 3
    assert seen == [target]


def test_the_schema_of_an_operator_says_what_it_writes():
    schema = compat_torch.schema_of(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments if argument.alias_info] == ["self"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[2].kwarg_only
    assert [str(returned.type) for returned in schema.returns] == ["Tensor"]


def test_a_tensor_can_be_marked_as_a_parameter():
    tensor = torch.ones(2).as_subclass(_ClaimsDevice)
    compat_torch.mark_as_parameter(tensor, True)
    assert isinstance(tensor, nn.Parameter)
    compat_torch.mark_as_parameter(tensor, False)
    assert not isinstance(tensor, nn.Parameter)


def test_a_dispatch_mode_sees_factories_and_nested_containers_are_walked():
    class Mode(compat_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode():
        torch.zeros(2)
    assert seen == [torch.ops.aten.zeros.default]
    nested = {"a": [1, torch.ones(1)], "b": (2,)}
    assert len(compat_torch.pytree.tree_leaves(nested)) == 3
    assert compat_torch.pytree.tree_map(str, nested)["b"] == ("2",)
    assert compat_torch.pytree.tree_map_only(int, float, nested)["b"] == (2.0,)

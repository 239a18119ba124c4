"""The contract with the dependencies: every private name that is used exists, with the expected signature."""

import torch

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


# -- torch: comm, checkpoint -------------------------------------------------------------------------------------------


def test_the_default_store_is_found(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        compat_torch.default_store().set("key", "value")
        assert compat_torch.default_store().check(["key"])
    finally:
        torch.distributed.destroy_process_group()


def test_the_parameters_of_a_module_are_its_own_dict():
    module = torch.nn.Linear(2, 2, bias=False)
    compat_torch.parameters_of(module)["bias"] = torch.nn.Parameter(torch.ones(2))
    assert dict(module.named_parameters()).keys() == {"weight", "bias"}
    assert compat_torch.parameters_of(torch.nn.Linear(2, 2, bias=False))["bias"] is None

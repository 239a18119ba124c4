"""The contract with the dependencies: every private name that the library uses is there, with the expected signature."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, _init_utils, _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.torch import is_backward_running


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


# -- compression: where DDP, FSDP and DeepSpeed communicate gradients --------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (DistributedDataParallel.__init__, ["_ddp_params_and_buffers_to_ignore"]),
        (FSDPParamGroup.__init__, ["_all_reduce_hook", "_reduce_scatter_comm", "mesh_info", "fsdp_params"]),
        (FSDPParam, ["_orig_size", "sharded_param", "sharded_size", "padded_sharded_param_size", "fsdp_placement"]),
        (FSDPState, ["_fsdp_param_group"]),
        (FlatParamHandle, ["flat_param"]),
    ],
)
def test_attributes_of_private_objects_are_set_by_torch(owner, names):
    source = inspect.getsource(owner)
    assert [name for name in names if name not in source] == []


def test_the_layout_of_flat_parameters_is_known():
    names = {"_fqns", "_shapes", "_numels_with_padding", "_is_padding_mask", "_unpadded_unsharded_size"}
    assert names <= FlatParameter.__annotations__.keys()
    for views in (FlatParamHandle._get_unflat_views_aligned, FlatParamHandle._get_unflat_views_unaligned):
        assert list(inspect.signature(views).parameters) == ["self", "tensor"]


def test_fsdp_calls_communication_hooks_as_we_define_them():
    assert "state._comm_hook_state, padded_unsharded_grad, new_sharded_grad" in inspect.getsource(_runtime_utils)
    assert "_inter_node_pg" in inspect.getsource(_init_utils)
    for name in ("set_all_reduce_hook", "set_custom_reduce_scatter", "_get_fsdp_state"):
        assert callable(getattr(FSDPModule, name))


def test_backward_is_seen_while_it_runs():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(is_backward_running()))
    (2 * x).sum().backward()
    assert seen == [True]
    assert not is_backward_running()


def test_deepspeed_averages_gradients_where_we_replace_it():
    engine = pytest.importorskip("deepspeed.runtime.engine").DeepSpeedEngine
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    names = list(inspect.signature(DeepSpeedZeroOptimizer.gradient_reduction_w_predivide).parameters)
    assert names == ["self", "tensor", "communication_data_type"]
    zero = inspect.getsource(DeepSpeedZeroOptimizer)
    for name in ("self.reduce_scatter", "self.check_grad_overflow", "self.ipg_buckets", "self.bit16_groups"):
        assert name in zero
    for name in ("buffered_allreduce_fallback", "clip_fp32_gradients", "_get_gradients_for_reduction"):
        assert callable(getattr(engine, name))
    bf16 = inspect.getsource(BF16_Optimizer)
    for name in ("def get_grads_for_reduction", "self.bf16_groups", "self.fp32_groups_gradients"):
        assert name in bf16

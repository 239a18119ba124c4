"""The contract with the dependencies: every private name that is used exists, with the expected signature."""

import copy
import inspect
import threading
import weakref
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils, _runtime_utils, fully_shard
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import SequentialSampler
from torchmetrics import MeanMetric, MetricCollection

from lightning_parallel.compat import DIVISION, Division, Patches, hook_after, patched
from lightning_parallel.compat import deepspeed as compat_deepspeed
from lightning_parallel.compat import initialization as compat_initialization
from lightning_parallel.compat import lightning as compat_lightning
from lightning_parallel.compat import precision as compat_precision
from lightning_parallel.compat import torch as compat_torch
from lightning_parallel.compat.default_group import backend_of, default_store, set_timeout
from lightning_parallel.compat.dispatcher import (
    Interceptor,
    current_graph_task_id,
    groups_past_dispatcher,
    intercepted_collectives,
    is_coalescing,
    on_graph_end,
    unseen,
)
from lightning_parallel.compat.lightning import (
    asynchronous_io,
    ddp_hook_state,
    early_optimizers,
    finish_saves,
    innermost_io,
    logged_step,
    run_after_saves,
    should_update_logs,
    wrapped_sampler,
)
from lightning_parallel.compat.torch import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    CUDA_FLASH_ATTENTION,
    CUDA_FLASH_ATTENTION_BACKWARD,
    DispatchMode,
    NormalizationBase,
    TorchDispatchMode,
    flight_recorder_entries,
    has_unsharded_storage,
    is_backward_running,
    overload_packet,
    pytree,
    saved_tensors_hooks_now,
    schema_of,
    sharded_flat_parameters,
    storage_address,
    version_of,
)
from lightning_parallel.compression import Dense, compress_fully_shard
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for


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


def _divided():
    """Return a layer with a record of its division, and hooks before and after ours."""
    layer = nn.Linear(2, 2)
    layer.heads = 4
    layer.register_forward_hook(lambda *_: None)
    record = Division.of(layer)
    record.keep(layer, "heads", "group")
    layer.__class__ = type("Sharded", (nn.Linear,), {})
    layer.heads, layer.group = 2, "ranks"
    hook_after(layer, lambda *_: None, prepend=True)
    layer.register_forward_hook(lambda *_: None)
    record.close(layer)
    return layer


@pytest.mark.parametrize("make", [_divided, lambda: copy.deepcopy(_divided())])
def test_a_division_is_undone_and_redone_around_values_of_the_user(make):
    layer = make()
    layer._hooks_installed = True  # as Hugging Face's models have
    record, order = Division.of(layer), list(layer._forward_hooks)
    undone = record.undo(layer)
    assert (type(layer), layer.heads, list(layer._forward_hooks)) == (nn.Linear, 4, order[1:])
    assert not {"group", DIVISION} & vars(layer).keys()
    layer.register_forward_hook(lambda *_: None)
    record.redo(layer, *undone)
    assert (type(layer).__name__, layer.heads, layer.group) == ("Sharded", 2, "ranks")
    assert list(layer._forward_hooks)[:-1] == order
    layer.heads = 8
    record.undo(layer)
    assert layer.heads == 8


# -- compression: where DDP, FSDP and DeepSpeed communicate gradients --------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (DistributedDataParallel.__init__, ["_ddp_params_and_buffers_to_ignore"]),
        (FSDPParamGroup.__init__, ["mesh_info", "fsdp_params"]),
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
    assert callable(FSDPModule._get_fsdp_state)
    hooks = {"set_all_reduce_hook": "_all_reduce_hook", "set_custom_reduce_scatter": "_reduce_scatter_comm"}
    for name, attribute in hooks.items():
        # Where torch lacks one, it is refused to compress what needs it.
        assert hasattr(FSDPModule, name) == (attribute in inspect.getsource(FSDPParamGroup.__init__))


@distributed(world_size=1)
def test_fully_shard_without_hooks_is_refused(group):
    if hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip(f"`fully_shard` of torch {torch.__version__} has hooks for gradients")
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match=r"`FSDPModule.set_custom_reduce_scatter`.*Install a newer version"):
        compress_fully_shard(model, Dense())


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


# -- torch: comm, checkpoint -------------------------------------------------------------------------------------------


def test_the_default_store_is_found(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert default_store().check(["key"])
    finally:
        torch.distributed.destroy_process_group()


# -- used by tensor -----


def test_private_names_of_torch_that_tensor_uses():
    layer = nn.Linear(2, 2, bias=False)
    assert compat_torch.parameters_of(layer) == {"weight": layer.weight, "bias": None}
    compat_torch.parameters_of(layer)["bias"] = nn.Parameter(torch.ones(2))  # the module's own dict
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    x = torch.ones(2)
    reshaped = compat_torch.unsafe_view(x.requires_grad_() * 1, (2, 1))
    reshaped.add_(1)
    assert reshaped.shape == (2, 1)
    assert not reshaped._is_view()


def test_a_function_may_run_around_each_call():
    layer = nn.Linear(2, 2)
    calls = []

    def around(run, args, kwargs):
        calls.append(kwargs)
        return run(*args, **kwargs)

    vars(layer)[compat_torch.CALLS] = compat_torch.AroundCalls(layer, around)
    layer.register_forward_hook(lambda module, args, output: calls.append("hook"))
    layer(input=torch.ones(2))
    assert [list(call) for call in calls] == [["input"], list("hook")]
    assert not compat_torch.has_compiled_parts(layer)
    assert vars(copy.deepcopy(layer)).get(compat_torch.CALLS) is None
    assert copy.deepcopy(vars(layer)[compat_torch.CALLS]) is None


@distributed(world_size=1)  # whose process has imported the compiler, which takes seconds
def test_a_compiled_call_is_known():
    layer = nn.Linear(2, 2)
    assert not compat_torch.has_compiled_parts(layer)
    layer.compile()
    assert compat_torch.has_compiled_parts(layer)
    assert compat_torch.has_compiled_calls(layer)
    assert not compat_torch.uses_cuda_graphs(layer)
    recorded = nn.Linear(2, 2)
    recorded.compile(mode="reduce-overhead")
    assert compat_torch.uses_cuda_graphs(recorded)
    assert compat_torch.uses_cuda_graphs(torch.compile(nn.Linear(2, 2), mode="max-autotune"))
    assert not compat_torch.uses_cuda_graphs(torch.compile(nn.Linear(2, 2), mode="max-autotune-no-cudagraphs"))


def test_a_backward_pass_has_an_id_while_it_runs():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat_torch.current_graph_task_id()))
    keeps = []
    x.register_hook(lambda _: keeps.append(compat_torch.keeps_graph()))
    for is_kept in (False, True):
        (2 * x).backward(retain_graph=is_kept)
    assert keeps == [False, True]
    assert compat_torch.current_graph_task_id() == -1
    assert len(set(seen)) == 2
    assert -1 not in seen


def test_gradients_of_the_tensors_of_this_rank():
    x, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    found = compat_torch.gradients_here((x**3).sum(), [x, unused], create_graph=True)
    assert found[0].tolist() == [3, 3]
    assert found[1] is None
    assert compat_torch.gradients_here(found[0], [x], torch.tensor([1.0, 2.0]))[0].tolist() == [6, 12]
    assert x.grad is None


def test_private_names_of_transformers():
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    plan = compat_initialization.tensor_parallel_plan_of(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    compat_initialization.weight_initializer_of(model)(model.lm_head)
    assert compat_initialization.tensor_parallel_plan_of(nn.Linear(2, 2)) == {}
    assert compat_initialization.weight_initializer_of(nn.Linear(2, 2)) is None


def test_a_class_and_a_refused_value_are_put_back():
    class Other(_Target):
        pass

    target = _Target()
    patches = Patches()
    patches.replace(target, "__class__", Other)
    with pytest.raises(TypeError):
        patches.replace([], "__class__", Other)
    assert type(target) is Other
    patches.undo()
    assert type(target) is _Target


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_tensors_and_storages_have_identities_and_versions():
    tensor = torch.zeros(3)
    assert storage_address(tensor.untyped_storage()) == storage_address(tensor[1:].untyped_storage())
    assert storage_address(tensor.untyped_storage()) != storage_address(torch.zeros(3).untyped_storage())
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1


def test_backward_and_operators_are_known():
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((overload_packet(func), is_backward_running()))
            return func(*args, **(kwargs or {}))

    class DerivedOps(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, 2, requires_grad=True)
    with Ops():
        (weight @ weight).sum().backward()
    # Without the wrapper of torch around its method.
    assert not hasattr(DerivedOps.__torch_dispatch__, "__wrapped__")
    products = [(op, inside) for op, inside in seen if op is torch.ops.aten.mm]
    assert products[0] == (torch.ops.aten.mm, False)
    assert (torch.ops.aten.mm, True) in products
    assert CPU_FLASH_ATTENTION is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inputs, sums = ["query", "key", "value"], ["out", "logsumexp"]
    for operator in (CPU_FLASH_ATTENTION, CUDA_FLASH_ATTENTION):
        schema = operator.default._schema
        assert [argument.name for argument in schema.arguments][:5] == [*inputs, "dropout_p", "is_causal"]
        assert schema.returns[1].name == "logsumexp"
    for operator, middle in (
        (CPU_FLASH_ATTENTION_BACKWARD, ["dropout_p", "is_causal"]),
        (CUDA_FLASH_ATTENTION_BACKWARD, ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]),
    ):
        names = [argument.name for argument in operator.default._schema.arguments if argument.name != "scale"]
        assert names[: 6 + len(middle)] == ["grad_out", *inputs, *sums, *middle]
    assert issubclass(nn.BatchNorm1d, NormalizationBase)
    assert issubclass(nn.InstanceNorm2d, NormalizationBase)
    assert pytree.tree_leaves({"a": [1, 2], "b": 3}) == [1, 2, 3]


class Nested(Interceptor):
    """Notes what passes."""

    def __init__(self):
        self.seen = []

    def is_listening(self):
        return True

    def issue(self, collective, call):
        self.seen.append((collective.op, collective.process_group, type(call())))

    def wait(self, work, call):
        self.seen.append("wait")
        return call()

    wait_event = wait

    def wait_tensor(self, tensor, call):
        return self.wait(None, call)

    def finish(self, call):
        return self.wait(None, call)


@distributed(world_size=2)
def test_collectives_and_waits_are_intercepted_and_none_after(group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    outer, inner, ends = Nested(), Nested(), []
    with intercepted_collectives(outer):
        loss = model(torch.ones(4, 3)).sum()
        loss.register_hook(lambda _: on_graph_end(lambda: ends.append(list(outer.seen))))
        assert current_graph_task_id() == -1
        loss.backward()
        with intercepted_collectives(inner):  # the last one is shown what passes
            dist.all_reduce(torch.ones(1))
    buffers, *sent, reduced = outer.seen
    assert buffers == "wait"
    assert sent == [("broadcast", dist.group.WORLD, dist.Work)] * 2
    assert reduced == ("all_reduce", dist.group.WORLD, dist.Work)
    assert ends == [outer.seen], "after the last bucket was sent"
    assert inner.seen == [("all_reduce", dist.group.WORLD, dist.Work), "wait"]
    model(torch.ones(4, 3)).sum().backward()
    dist.all_reduce(torch.ones(1))
    assert (len(outer.seen), len(inner.seen)) == (4, 2)
    assert not is_coalescing(dist.group.WORLD)
    assert groups_past_dispatcher() == []
    model.register_comm_hook(None, default_hooks.allreduce_hook)  # DDP's only place for one is free


class Making(TorchDispatchMode):
    """Makes a tensor beside each operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        torch.zeros(1)
        return func(*args, **(kwargs or {}))


@distributed(world_size=2)
def test_messages_that_are_recorded_elsewhere_pass_unseen(group):
    def swap():
        sent, received = torch.full((3,), 1.0 + group.rank), torch.zeros(3)
        with unseen():
            works = dist.irecv(received, 1 - group.rank), dist.isend(sent, 1 - group.rank)
        for work in works:
            work.wait()
        assert received.tolist() == [2.0 - group.rank] * 3

    seen = Nested()
    swap()
    with intercepted_collectives(seen):
        swap()
        assert seen.seen == ["wait", "wait"]
        with Making():  # whose tensors need what `unseen` takes away
            swap()
        assert [one[0] for one in seen.seen] == ["w", "w", "recv", "send", "w", "w"]


@distributed(world_size=2)
def test_flat_parameters_of_fsdp_are_known(group):
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    (flat,) = sharded_flat_parameters(model)
    assert not has_unsharded_storage(flat)
    model(torch.ones(1, 4)).sum().backward()
    assert has_unsharded_storage(flat)
    assert sharded_flat_parameters(nn.Linear(4, 4)) == []


def test_function_modes_that_a_hook_entered_are_left_when_a_base_exception_passes():
    module, mode = nn.Linear(2, 2), TorchFunctionMode()
    module.register_forward_pre_hook(lambda *_: mode.__enter__() and None)
    module.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True)
    module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), compat_torch.function_modes_kept():
        module(torch.ones(1, 2))
    assert compat_torch.current_function_mode() is None


def test_functional_calls_exchange_tensors_by_the_given_function():
    layer, asked = nn.Linear(2, 2), []

    def swap(own, module, name, tensor, **kwargs):
        asked.append((module, name))
        return own(module, name, tensor, **kwargs)

    with compat_torch.functional_calls_swap(swap):
        torch.func.functional_call(layer, {"weight": torch.zeros(2, 2)}, (torch.ones(1, 2),))
    assert asked == [(layer, "weight")] * 2  # there and back


def test_nodes_of_the_graph_are_numbered_as_they_are_made():
    begin = compat_torch.graph_position()
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert begin <= compat_torch.position_in_graph(node) < compat_torch.graph_position()


def test_the_flight_recorder_is_where_it_was():
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    assert any(callable(getattr(torch._C._distributed_c10d, name, None)) for name in names)
    # Tests before this one may have used collectives in this process.
    assert all(
        {"process_group", "collective_seq_id", "is_p2p", "profiling_name"} <= entry.keys()
        for entry in flight_recorder_entries()
    )


# -- used by pipeline --------------------------------------------------------------------------------------------------


def test_children_and_hooks_are_the_dicts_of_the_module():
    layer = nn.Linear(2, 2)
    twice = nn.ModuleList([layer, layer])
    assert list(compat_torch.children_of(twice).items()) == [("0", layer), ("1", layer)]
    after, before = compat_torch.forward_hooks_of(layer)
    assert (after, before) == ({}, {})
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(repr)
    assert (list(after.values()), list(before.values())) == ([print], [repr])
    layer.register_full_backward_hook(print)
    layer.register_full_backward_pre_hook(repr)
    assert [list(hooks.values()) for hooks in compat_torch.backward_hooks_of(layer)] == [[print], [repr]]
    for hooks in compat_torch.backward_hooks_of(layer):
        hooks.clear()
    after.clear()
    before.clear()
    layer.register_state_dict_post_hook(lambda *_: None)
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    assert [len(hooks) for hooks in compat_torch.state_hooks_of(layer)] == [1, 1]
    layer(torch.ones(2))


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("not to be asked")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func


def test_tensors_without_data_and_schemas_of_operators():
    wrapper = compat_torch.make_wrapper_subclass(
        _Wrapper, torch.Size([2, 3]), strides=(3, 1), dtype=torch.float16, device=torch.device("cpu")
    )
    assert type(wrapper) is _Wrapper
    with compat_torch.DisableTorchFunctionSubclass():
        assert (wrapper.shape, wrapper.stride(), wrapper.dtype) == ((2, 3), (3, 1), torch.float16)
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments if argument.alias_info] == ["self"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[2].kwarg_only
    assert [str(returned.type) for returned in schema.returns] == ["Tensor"]


def test_a_copy_with_other_tensors_keeps_ties_and_copies_no_data():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.tied = model[0].weight
    model.pruned = model[0].weight * 2
    known = {id(parameter): nn.Parameter(parameter.to("meta")) for parameter in model.parameters()}
    copied = compat_torch.copy_of(model, known)
    assert copied.tied is copied[0].weight
    assert all(parameter.is_meta for parameter in copied.parameters())
    assert copied.pruned.grad_fn is None
    assert torch.equal(copied[1].running_var, model[1].running_var)
    assert copied[1].running_var is not model[1].running_var


# -- used by strategies with compression -------------------------------------------------------------------------------


@distributed(world_size=2)
def test_a_module_can_be_wrapped_by_ddp_anew(group):
    layer = nn.Linear(3, 2)
    for _ in range(2):
        model = DistributedDataParallel(layer)
        model(torch.ones(1, 3)).sum().backward()
        compat_torch.remove_ddp_hooks(model)
    layer.weight.grad = None
    layer(torch.ones(1, 3) * group.rank).sum().backward()
    assert layer.weight.grad.sum() == 6 * group.rank, "nothing is averaged any more"


@distributed(world_size=2)
def test_fsdp_says_whether_it_reduces_gradients(group):
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    seen = []
    for context in (nullcontext, model.no_sync):
        with context():
            loss = model(torch.ones(1, 4)).sum()
            seen.append(compat_torch.fsdp1_synchronizes(model))
            loss.backward()
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("package", "fabric"), [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")]
)
def test_the_door_of_both_packages(package, fabric):
    connector = import_module(f"{package}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    assert "strategy" in inspect.signature(connector.__init__).parameters
    assert inspect.unwrap(connector.__init__) is not connector.__init__, "strategies come in through it"
    import_module(package).Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert rank_zero.log.name == f"{package}.utilities.rank_zero"
    assert rank_zero.rank_zero_deprecation_category.__module__ == f"{fabric}.utilities.rank_zero"
    assert import_module(f"{package}.utilities.rank_zero").rank_zero_only is rank_zero.rank_zero_only


def test_precision():
    tensors = [torch.full((2,), 3.0), torch.full((3,), 5.0, dtype=torch.float64), torch.ones(0)]
    compat_precision.scale_all(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[1.5] * 2, [2.5] * 3, []]
    before = torch.get_float32_matmul_precision()
    for precision, is_tf32 in (("high", True), ("highest", False)):
        torch.set_float32_matmul_precision(precision)
        assert compat_precision.uses_tf32() == is_tf32
    torch.set_float32_matmul_precision(before)
    compat_torch.assert_on_device(torch.tensor(True), "")
    with pytest.raises(RuntimeError, match="said so"):
        compat_torch.assert_on_device(torch.tensor(False), "said so")
    # What is kept across contexts; without `shared_casts`, Lightning's setting comes back.
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with compat_precision.shared_casts(x.device):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), compat_precision.kept_casts():
            first = layer(x).grad_fn.next_functions
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            with compat_precision.kept_casts():
                assert first[0] == layer(x).grad_fn.next_functions[0]
            assert not torch.is_autocast_cache_enabled()


@distributed(world_size=2)
def test_groups_know_their_backends_and_take_a_timeout(group):
    assert backend_of(group.process_group) == "gloo"
    both = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert backend_of(both) == "cpu:gloo,cuda:gloo"
    if "backend" not in inspect.signature(dist.split_group).parameters:
        pytest.skip(f"torch {torch.__version__} splits no groups with gloo off, which alone need a timeout set")
    set_timeout(both, timedelta(seconds=1))
    if group.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.zeros(1), group=both)
    dist.barrier()


@distributed(world_size=2)
def test_collectives_of_one_tensor(group):
    whole = torch.empty(4)
    compat_torch.all_gather_single(whole, torch.full((2,), float(group.rank)))
    assert whole.tolist() == [0, 0, 1, 1]
    compat_torch.reduce_scatter_single(part := torch.empty(2), whole)
    assert part.tolist() == [2.0 * group.rank] * 2
    with dist.distributed_c10d._coalescing_manager(async_ops=True):
        assert is_coalescing(dist.group.WORLD)
        dist.all_reduce(part, async_op=True)


def test_what_constructors_only_take():
    assert compat_precision.device_of_scaler(torch.amp.GradScaler("cpu")) == "cpu"
    timeout = timedelta(seconds=7)
    assert compat_lightning.timeout_of(DDPStrategy(timeout=timeout)) is timeout
    assert compat_lightning.state_dict_type_of(FSDPStrategy(state_dict_type="sharded")) == "sharded"
    strategy = SingleDeviceStrategy()
    assert compat_lightning.strategy_of(compat_lightning.FunctionLauncher(strategy)) is strategy
    assert "ckpt_path" in inspect.signature(Trainer._run).parameters, "`checkpoint_of_run` reads it"
    assert compat_lightning.is_end_of_tuning(_TunerExitException())
    assert "hook_name" in inspect.signature(call._call_callback_hooks).parameters, "`_hook` of messages reads it"
    assert not inspect.signature(DeepSpeedStrategy._init_deepspeed_distributed).parameters.keys() - {"self"}


class _AskForTheLoader(Callback):
    def setup(self, trainer, pl_module, stage):
        self.found = compat_lightning.train_dataloader_of(trainer)


def test_saves_in_a_thread_are_followed_and_their_failure_is_told_once():
    events, written = [], threading.Event()

    class Slow(CheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.wait(60)
            events.append(path)
            if path == "fails":
                raise OSError("full")

        def load_checkpoint(self, path, map_location=None, weights_only=None): ...

        def remove_checkpoint(self, path): ...

    io = AsyncCheckpointIO(AsyncCheckpointIO(Slow()))
    assert asynchronous_io(io) is io
    assert isinstance(innermost_io(io), Slow)
    assert asynchronous_io(Slow()) is None
    run_after_saves(io, lambda: events.append("nothing to wait for"))
    io = AsyncCheckpointIO(Slow())
    io.save_checkpoint({}, "a")
    run_after_saves(io, lambda: events.append("after a"))
    io.save_checkpoint({}, "fails")
    run_after_saves(io, lambda: events.append("after a failure"))
    assert events == ["nothing to wait for"]
    written.set()
    assert str(finish_saves(io)) == "full"
    assert events == ["nothing to wait for", "a", "after a", "fails"]
    assert finish_saves(io) is None


def test_the_loader_is_known_before_the_loop_begins():
    callback, data = _AskForTheLoader(), loader()
    trainer_for(callbacks=[callback], max_steps=1).fit(Net().double(), data)
    assert callback.found is data


def test_private_names_of_deepspeed():
    ops = pytest.importorskip("deepspeed.ops")
    with patched(ops, "__compatible_ops__", dict(ops.__compatible_ops__)):
        assert "deepspeed_shm_comm" in ops.__compatible_ops__
        compat_deepspeed.disable_shared_memory_kernel()
        assert ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_hooks_that_see_gradients_accumulate_are_removed():
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    assert "self._grad_acc_hooks" in inspect.getsource(zero.DeepSpeedZeroOptimizer.create_gradient_handling_hooks)
    parameter = nn.Parameter(torch.ones(1))
    seen = []
    optimizer = SimpleNamespace(_grad_acc_hooks=[parameter.register_hook(seen.append)])
    compat_deepspeed.remove_accumulation_hooks(optimizer)
    parameter.sum().backward()
    assert seen == []


class _LogSteps(Callback):
    def __init__(self):
        self.logged = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if should_update_logs(trainer):
            self.logged.append(logged_step(trainer))


def test_steps_that_are_logged():
    callback = _LogSteps()
    trainer_for(callbacks=[callback], log_every_n_steps=2, max_epochs=1).fit(Net().double(), loader())
    assert callback.logged == [1, 3]


def test_samplers_and_hook_states_of_lightning():
    sampler = SequentialSampler(range(4))
    assert wrapped_sampler(DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)) is sampler
    assert ddp_hook_state(DDPStrategy(ddp_comm_state="state")) == "state"
    assert ddp_hook_state(SingleDeviceStrategy()) is None


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


def test_the_function_inside_of_trunc_normal():
    drawn = []
    with patched(nn.init, compat_torch.TRUNC_NORMAL, lambda tensor, *args, **kwargs: drawn.append(tensor)):
        tensor = torch.empty(3)
        nn.init.trunc_normal_(tensor, std=0.02)
    assert drawn[0] is tensor


def test_modes_see_that_data_are_given():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, plain, tensor, patches = [], torch.Tensor.data.__set__, torch.ones(2), Patches()
    compat_torch.give_data(patches)
    try:
        with Mode():
            tensor.data = torch.zeros(2)
    finally:
        patches.undo()
    assert seen == [torch.zeros, plain]
    assert tensor.tolist() == [0, 0]
    assert torch.Tensor.data.__set__ == plain


def test_tensors_that_are_followed_are_not_swapped_and_the_error_says_what_to_do():
    one, other, patches = torch.ones(2), torch.zeros(2), Patches()
    compat_torch.explain_swaps(patches)
    try:
        torch.utils.swap_tensors(one, other)
        assert one.tolist() == [0, 0]
        reference = weakref.ref(one)
        with pytest.raises(RuntimeError, match=r"cannot exchange tensors of this model.*weakref.*`tensor.data = ...`"):
            torch.utils.swap_tensors(one, other)
        assert reference() is one
    finally:
        patches.undo()


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


def test_a_tensor_can_be_marked_as_a_parameter():
    tensor = torch.ones(2).as_subclass(_ClaimsDevice)
    compat_torch.mark_as_parameter(tensor, True)
    assert isinstance(tensor, nn.Parameter)
    compat_torch.mark_as_parameter(tensor, False)
    assert not isinstance(tensor, nn.Parameter)


def test_functions_are_replaced_for_those_who_hold_them_already():
    def twice(value, *, times=2):
        return times * value

    def holds_one(value, hidden=twice):
        return hidden(value), other(value), closure(value)

    other, closure, patches = twice, lambda value: offset + value, Patches()
    offset = 5
    assert holds_one(3) == (6, 6, 8)
    for function in (twice, closure):
        patches.replace_function(function, lambda original: lambda *args, **kwargs: -original(*args, **kwargs))
    assert holds_one(3) == (-6, -6, -8)
    assert twice(3, times=4) == -12
    patches.undo()
    assert holds_one(3) == (6, 6, 8)
    assert not [name for name in globals() if name.startswith("_replacement")]


# -- used by callbacks that let a run go on ----------------------------------------------------------------------------


def test_loops_and_connectors_have_what_interrupted_runs_need():
    trainer = trainer_for()
    loop = trainer.fit_loop.epoch_loop
    assert list(inspect.signature(loop.advance).parameters) == ["data_fetcher"]
    connector = trainer._checkpoint_connector
    assert list(inspect.signature(connector._restore_modules_and_callbacks).parameters)[0] == "checkpoint_path"
    assert not inspect.signature(connector.restore_training_state).parameters
    prepare = inspect.signature(trainer._data_connector._prepare_dataloader).parameters
    assert list(prepare) == ["dataloader", "shuffle", "mode"]
    assert callable(trainer._data_connector._requires_distributed_sampler)
    assert trainer._signal_connector._original_handlers == {}
    assert trainer._logger_connector._callback_metrics == {}
    assert not inspect.signature(trainer._logger_connector.epoch_end_reached).parameters
    progress = loop.batch_progress
    assert (
        vars(progress.current).keys() == {"ready", "started", "processed", "completed"} == vars(progress.total).keys()
    )


def test_hooks_of_tensors_and_optimizers_can_be_replaced():
    parameter, seen = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(seen.append)
    parameter.register_post_accumulate_grad_hook(seen.append)
    for hooks in compat_torch.gradient_hooks_of(parameter):
        hooks.update(dict.fromkeys(hooks, lambda _: seen.append("replaced")))
    parameter.sum().backward()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    before, after = compat_torch.step_hooks_of(optimizer)
    assert len(before) == len(after) == 1
    assert all(isinstance(one, dict) for one in compat_torch.global_step_hooks())
    optimizer.step()
    assert seen == ["replaced", "replaced", "before", "after"]
    assert compat_torch.base_name(torch.ops.aten._foreach_add_.Scalar) == "add"
    assert compat_torch.current_dispatch_mode() is compat_torch.current_function_mode() is None


def test_optimizers_can_be_asked_for_before_they_are_set_up():
    module, trainer = Net(), trainer_for()
    strategy = trainer.strategy
    strategy.connect(module)
    module.trainer = trainer
    with early_optimizers(strategy, module):
        assert isinstance(trainer.optimizers[0], torch.optim.Optimizer)
        assert module.optimizers().optimizer is trainer.optimizers[0]
        assert len(trainer.lr_scheduler_configs) == len(strategy.lr_scheduler_configs)
    assert trainer.optimizers == strategy._lightning_optimizers == strategy.lr_scheduler_configs == []


def test_states_of_metrics_can_be_put_together():
    metric = MeanMetric()
    assert metric._reductions.keys() == metric._defaults.keys()
    assert list(inspect.signature(metric._reduce_states).parameters) == ["incoming_state"]
    assert {"_update_count", "_computed", "_forward_cache"} <= vars(metric).keys()
    collection = MetricCollection([metric])
    assert collection._enable_compute_groups
    assert not collection._groups_checked


def test_state_dicts_tell_of_versions():
    assert nn.BatchNorm1d(2).state_dict()._metadata[""] == {"version": 2}


def test_the_hooks_of_saved_tensors_that_hold_now_are_told():
    outer, inner = (abs, float), (len, int)
    assert saved_tensors_hooks_now() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert saved_tensors_hooks_now() == inner
        assert saved_tensors_hooks_now() == outer
    assert saved_tensors_hooks_now() is None

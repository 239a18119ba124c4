"""The contract with the dependencies: every private name that is used exists, with the expected signature."""

import torch
import transformers
from torch import nn

from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat import torch as compat_torch
from lightning_parallel.compat import transformers as compat_transformers


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


# -- used by tensor -----


def test_private_names_of_torch_that_tensor_uses():
    layer = nn.Linear(2, 2, bias=False)
    assert compat_torch.parameters_of(layer) == {"weight": layer.weight, "bias": None}
    assert not compat_torch.has_compiled_call(layer)
    layer.compile()
    assert compat_torch.has_compiled_call(layer)
    x = torch.ones(2)
    before = compat_torch.version_of(x)
    x.add_(1)
    assert compat_torch.version_of(x) > before
    assert compat_torch.pytree.tree_leaves({"a": [x, 1]}) == [x, 1]
    reshaped = compat_torch.unsafe_view(x.requires_grad_() * 1, (2, 1))
    reshaped.add_(1)
    assert reshaped.shape == (2, 1)
    assert not reshaped._is_view()


def test_a_backward_pass_has_an_id_while_it_runs():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat_torch.current_graph_task_id()))
    for _ in range(2):
        (2 * x).backward()
    assert compat_torch.current_graph_task_id() == -1
    assert len(set(seen)) == 2
    assert -1 not in seen


def test_private_names_of_transformers():
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    plan = compat_transformers.tensor_parallel_plan_of(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    compat_transformers.weight_initializer_of(model)(model.lm_head)
    assert compat_transformers.tensor_parallel_plan_of(nn.Linear(2, 2)) == {}
    assert compat_transformers.weight_initializer_of(nn.Linear(2, 2)) is None

"""`from_pretrained` in an unmodified `configure_model`: recorded there, read by parts later."""

import os
import tempfile
import threading
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file, save_file

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.checkpoint.weights import WeightFiles
from lightning_parallel.compat import patched
from lightning_parallel.strategies.deferred.chain import stored_origin
from lightning_parallel.strategies.deferred.init import deferred_init
from lightning_parallel.strategies.deferred.tensor import is_deferred, materialize
from tests.harness import distributed, run_script
from tests.strategies.models import trainer_for
from tests.strategies.test_materialize_owned import CONFIG, Built, data


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **options}))


def mixtral():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**CONFIG, **experts}))


def gpt2():
    config = transformers.GPT2Config(vocab_size=256, n_layer=2, n_head=4, n_embd=160, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def values(model):
    return {name: materialize(value) if is_deferred(value) else value for name, value in model.state_dict().items()}


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "mixtral": mixtral, "gpt2": gpt2}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16], ids=str)
def test_what_is_recorded_gives_what_is_loaded(tmp_path, kind, dtype):
    MODELS[kind]().save_pretrained(tmp_path, max_shard_size="1MB")
    torch.manual_seed(3)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with deferred_init("cpu"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), after)
    large = [value for value in model.parameters() if value.numel() > 2**14]
    assert all(map(is_deferred, large))
    # Experts are stacked when they are loaded, and so are read whole.
    assert all(stored_origin(value) is not None for value in large) or kind == "mixtral"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (kind in ("tied", "gpt2"))
    found = values(model)
    assert list(found) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_weights_that_a_file_lacks_are_initialised(tmp_path):
    llama().model.save_pretrained(tmp_path)
    with deferred_init("cpu"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(values(model)["model.embed_tokens.weight"], expected.model.embed_tokens.weight)
    head = values(model)["lm_head.weight"]
    assert stored_origin(model.lm_head.weight) is None
    assert 0.01 < head.std() < 0.03


def test_files_are_read_as_they_were_when_they_were_opened(tmp_path):
    state = {"large": torch.randn(200, 200), "small": torch.randn(3), "cut": torch.randn(200, 200)}
    save_file(state, tmp_path / "a.safetensors")
    elsewhere = []

    def load():
        elsewhere.append(load_file(tmp_path / "a.safetensors"))

    with deferred_init("cpu"):
        found = load_file(tmp_path / "a.safetensors")
        with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
            rows = file.get_slice("cut")[10:20]
            assert file.get_slice("cut").get_shape() == [200, 200]
        with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
            assert file.get_tensor("large").shape == (200, 200)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert is_deferred(found["large"])
    assert not is_deferred(found["small"])
    assert not is_deferred(elsewhere[0]["large"])
    (tmp_path / "a.safetensors").unlink()
    assert torch.equal(materialize(found["large"]), state["large"])
    assert torch.equal(rows, state["cut"][10:20])
    assert safetensors.torch.safe_open is safetensors.safe_open
    assert safetensors.safe_open.__module__ != "lightning_parallel.strategies.deferred.files"
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


LATE = """
import sys
for name in [name for name in sys.modules if name.startswith(("transformers", "safetensors", "lightning_parallel"))]:
    del sys.modules[name]
from lightning_parallel.strategies.deferred.init import deferred_init
from lightning_parallel.strategies.deferred.tensor import is_deferred
assert "transformers.modeling_utils" not in sys.modules
with deferred_init("cpu"):
    from transformers import AutoModel
    model = AutoModel.from_pretrained(sys.argv[1])
assert is_deferred(model.embed_tokens.weight)
import safetensors
from transformers import modeling_utils
assert modeling_utils.safe_open is safetensors.safe_open
assert isinstance(safetensors.safe_open, type), safetensors.safe_open
print("done")
"""


@pytest.mark.sweep(kept=None)
def test_what_is_imported_inside_of_the_block_is_left_as_it_is(tmp_path):
    llama().save_pretrained(tmp_path / "hub")
    (tmp_path / "late.py").write_text(LATE)
    # A process of its own, which forgets what those of the harness have imported.
    ended = run_script(tmp_path / "late.py", tmp_path / "hub")
    assert ended.stdout == "done\n", ended.stderr


class Pretrained(Built):
    """As people write it, for any strategy."""

    def __init__(self, folder):
        super().__init__("llama")
        self.folder = folder

    def configure_model(self):
        if self.model is None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)


@pytest.mark.sweep
@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
@distributed(world_size=2)
def test_each_rank_reads_what_it_owns(group, axis):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(prefix="lightning_parallel_test_"), group))
    if group.rank == 0:
        torch.manual_seed(11)
        llama().save_pretrained(folder, max_shard_size="300KB")
    comm.barrier(group)
    expected = Pretrained(folder)
    trainer_for("auto", 1, max_epochs=1).fit(expected, data())
    whole = sum(value.numel() * value.element_size() for value in expected.parameters())
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = HybridParallelStrategy(num_microbatches=2, balance="uniform", gather_after_fit="off", **{axis: 2})
    read = [0]

    def counted(source, name, rule=None, rank=0):
        value = before(source, name, rule, rank)
        read[0] += value.numel() * value.element_size()
        return value

    trainer = trainer_for(strategy, 2, max_epochs=1)
    with patched(WeightFiles, "read", counted) as before:
        trainer.fit(Pretrained(folder), data())
    assert 0.2 * whole < read[0] < 0.7 * whole
    found = trainer.strategy.lightning_module_state_dict()
    if group.rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name].float(), value, rtol=1e-5, atol=1e-6, msg=name)

"""Mixture-of-Experts models in every layout: gradients by name, weights and checkpoints of one process."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.tensor.pieces import without_pieces
from tests.harness import distributed
from tests.strategies.models import trainer_for
from tests.strategies.test_pipeline_models import Rows, Wrapped
from tests.tensor.test_experts import MODELS, OWN, VOCABULARY, hugging_face, in_double

LAYOUTS = {
    "one process": None,
    "tensor 2 x pipeline 2": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
    "tensor 2 x data 2": ({"tensor_parallel_size": 2, "checkpoint_format": "sharded"}, 2),
}


def fit(name, layout, devices, epochs=1, verifies=False, **options):
    """Train on one batch an epoch, on the samples of this rank's replica."""
    replicas, strategy = 1, "auto"
    if LAYOUTS[layout] is not None:
        sizes, replicas = LAYOUTS[layout]
        strategy = HybridParallelStrategy(num_microbatches=2, **sizes)
    # Auxiliary losses are no means over samples.
    model = OWN[name]() if name in OWN else hugging_face(name, output_router_logits=False)

    def step(batch):
        with in_double():
            return model.loss(batch) if name in OWN else model(input_ids=batch, labels=batch).loss

    module = Wrapped(model, step)
    tokens = torch.randint(3, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    rows = Rows(tokens, replicas, comm.Group.of().rank // (devices // replicas) if devices > 1 else 0)
    trainer = trainer_for(
        strategy,
        devices if strategy != "auto" else 1,
        verifies,
        max_epochs=epochs,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=len(rows)), **options)
    return module, trainer


def expect_gradients(module, expected):
    """Compare the gradients of the last step by name."""
    found = module.gradients[-1]
    for name, gradient in found.items():
        full = without_pieces(gradient)
        torch.testing.assert_close(full, expected[name], rtol=1e-9, atol=1e-11, msg=f"gradient of {name}")
    names = {name for held in comm.all_gather_object(list(found), comm.Group.of()) for name in held}
    assert names == expected.keys()


# The stacks of Mixtral are those of OLMoE; `tests/tensor` and `tests/pipeline` train Mixtral.
@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "MixtralForCausalLM"])
@distributed(world_size=4)
def test_each_layout_goes_on_from_the_checkpoint_of_another(group, name):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    layouts = ["tensor 2 x data 2", "tensor 2 x pipeline 2"]
    if name == "GptOssForCausalLM":  # has every kind of stack: transposed, with biases, with gate and up in turns
        layouts.reverse()
    expected, single = fit(name, "one process", 1, 2)
    paths = {layout: folder / f"{layout}.ckpt" for layout in layouts}
    for epoch, layout in enumerate(layouts):
        path = paths[layouts[0]] if epoch else None
        module, trainer = fit(name, layout, 4, epoch + 1, verifies="pipeline" in layout, ckpt_path=path)
        expect_gradients(module, expected.gradients[epoch])
        trainer.save_checkpoint(paths[layout])
        comm.barrier(group)
    if group.rank == 0:
        # The second step also takes the momenta of the checkpoint.
        torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-9, atol=1e-11)
    if group.rank == 0 and paths[layout].is_file():
        saved = torch.load(paths[layout], weights_only=False)
        torch.testing.assert_close(dict(saved["state_dict"]), dict(expected.state_dict()), rtol=1e-9, atol=1e-11)
        found, truth = saved["optimizer_states"][0]["state"], single.optimizers[0].state_dict()["state"]
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["tensor 2 x data 2", "tensor 2 x pipeline 2"])
@distributed(world_size=4)
def test_experts_without_tokens(layout):
    name = "a list of more experts than tokens"
    expected, _ = fit(name, "one process", 1)
    assert len(expected.gradients[-1]) < len(list(expected.parameters())), "some experts have no token"
    module, trainer = fit(name, layout, 4, verifies="pipeline" in layout)
    expect_gradients(module, expected.gradients[-1])

"""Functions of a parameter that is shown in full give the numbers of the full parameter, and change it alike."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.tensor.pieces import without_pieces
from lightning_parallel.tensor.sharded import ShardedTensor, ShardPlace, Slices
from lightning_parallel.tensor.sharding import Shard
from tests.harness import distributed, recorded_communication

ROWS, COLUMNS = 10, 6
RULES = {
    "rows": Shard.even(0, ROWS, 2),
    "columns": Shard.even(1, COLUMNS, 2),
    "uneven": Shard.of_sizes((7, 3)),
    "packed": Shard.packed(0, [4, 6], 2),
    "shared heads": Shard(0, (((0, 4), (4, 6)), ((2, 4), (6, 10)))),
    "one stage": Shard(0, (((0, ROWS),), ((0, 0),))),
}


def _saved(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=False).detach()


def _average(p):
    mine = p.detach().clone()
    mine.lerp_(p.detach() * 2, 0.3)
    norms = mine.norm(), mine[0].norm()
    p.copy_(mine.mul_(2))
    return norms


def _view_and_change(p):
    view = p.view(-1)
    before = view[0].clone()
    p.mul_(2)
    after = view[0].clone()
    view.add_(1)
    return before, after, p.sum()


def _momentum(p):
    kept = torch.zeros_like(p).add_(p.grad).mul_(0.9).add_(p)
    return kept.sum(), kept.norm(dim=1)


READS = {
    "sizes": lambda p: (tuple(p.shape), p.numel(), p.size(0), len(p), p.stride(), p.ndim, p.is_leaf, p.nbytes),
    "texts": lambda p: torch.tensor([hash(text) for text in (repr(p), str(p), f"{p}", repr(p.data), repr(p.grad))]),
    "compiled": lambda p: torch.compile(lambda q: (q * 2).sum() + q.norm(), backend="eager")(p),
    "identity": lambda p: (p is p, p in {p}, {p: 1}[p], p == p, torch.equal(p, p.clone()), p.tolist() == p.tolist()),
    "algebra": lambda p: (torch.einsum("ij,kj->ik", p, p), torch.linalg.matrix_norm(p, 2), torch.linalg.pinv(p)),
    "counts": lambda p: (p.unique().numel(), p.nonzero(), p.count_nonzero(), p.diff(dim=0), p.cumsum(0)),
    "a subset": lambda p: (pickle.loads(pickle.dumps(p)).sum(), copy.copy(p).sum(), p.float().double(), p.half().sum()),
    "equal": lambda p: (torch.equal(p, p), torch.equal(p.clone(), p), torch.equal(p, 2 * p), torch.equal(p, p[:2])),
    "norms": lambda p: (p.norm(), p.norm(dim=1), p.norm(dim=0, keepdim=True), torch.linalg.norm(p, 2), p.norm(1)),
    "extremes": lambda p: (p.abs().max().item(), p.min(), p.amax(1), p.argmax(), p.max(0).values, p.aminmax()),
    "statistics": lambda p: (torch.histc(p, 8), torch.quantile(p.flatten(), 0.9), p.median(), p.std(), p.std(1)),
    "tests": lambda p: (bool(torch.isfinite(p.grad).all()), (p > 0).any(), (p > 0).sum(), (p == p).all(0)),
    "products": lambda p: (p @ p.T, torch.linalg.svd(p).S, F.linear(torch.ones(2, COLUMNS).double(), p)),
    "similarities": lambda p: (F.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0), F.normalize(p, dim=0)),
    "joined": lambda p: (torch.cat([p, p.grad]).std(), nn.utils.parameters_to_vector([p]), torch.stack([p, p]).sum()),
    "values": lambda p: (p[0, 0].item(), p[3].tolist(), p.tolist()[0], float((p.detach().numpy() ** 2).sum())),
    "rows": lambda p: ([row.norm() for row in p], p[2:5], p[[0, -1]], p[p[:, 0] > 0].shape),
    "copies": lambda p: (copy.deepcopy(p).norm(), copy.deepcopy(p).mul_(2).sum(), _saved(p), p.clone()),
    "lists": lambda p: (torch._foreach_norm([p, p.grad]), torch._foreach_mul([p.detach()], 0.5)),
    "momentum": _momentum,
}
WRITES = {
    "scaled": lambda p: p.mul_(0.9).add_(torch.ones(ROWS, COLUMNS)).clamp_(-1),
    "by its rows": lambda p: p.mul_((3 / p.norm(dim=1, keepdim=True)).clamp(max=1)),
    "indices": lambda p: ((p.__setitem__(slice(0, 5), 0.1), p.__setitem__(-1, 2), p[3].zero_(), p.data[4].mul_(2))),
    "views": lambda p: (p.view(-1).mul_(0.5), p.t().add_(0.1), p[:, 2].neg_(), p.fill_diagonal_(2)),
    "a mask": lambda p: p.__setitem__(p.abs() < p.abs().flatten().kthvalue(7).values, 0),
    "draws": lambda p: p.add_(torch.randn_like(p)).mul_(torch.rand_like(p.grad)),
    "initialised": lambda p: ((nn.init.xavier_uniform_(p), nn.init.orthogonal_(p), nn.init.eye_(p), p.normal_())),
    "data": lambda p: setattr(p, "data", torch.where(p.data > 0, p.data, 0.9 * p.data)),
    "a vector": lambda p: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) * 2 + 1, [p]),
    "a product": lambda p: p.copy_(torch.linalg.svd(p, full_matrices=False)[0]),
    "centralised": lambda p: p.grad.sub_(p.grad.mean(1, keepdim=True)).sub_(p.grad.mean(0, keepdim=True)),
    "another gradient": lambda p: setattr(p, "grad", p.grad / (p.grad.norm() + 1)),
    "a full gradient": lambda p: setattr(p, "grad", torch.ones(ROWS, COLUMNS).double()),
    "noise": lambda p: setattr(p, "grad", p.grad.__iadd__(torch.randn_like(p.grad))),
    "lists": lambda p: torch._foreach_mul_([p.grad, p.data], torch._foreach_norm([p.grad])[0]),
    "largest": lambda p: p.grad.__setitem__(p.grad.abs() < p.grad.abs().flatten().topk(9).values[-1], 0),
    "torch's": lambda p: torch.nn.utils.clip_grad_value_([p], 0.1),
    "an average": _average,
    "random": lambda p: (p.data.uniform_(), p.add_(torch.empty_like(p).normal_()), p.copy_(F.dropout(p, 0.2))),
    "more draws": lambda p: p.add_(torch.bernoulli(torch.full_like(p, 0.5))).mul_(torch.randint_like(p, 5)),
    "rows by index": lambda p: (
        p.copy_(p[torch.randperm(ROWS)]),
        p.index_add_(0, torch.tensor([1, 5]), torch.ones(2, COLUMNS).double()),
        p.scatter_(0, torch.zeros(1, COLUMNS).long(), 0.3),
    ),
    "out": lambda p: (torch.mul(p, 0.5, out=p), torch.add(p, p, out=p)),
    "no gradient": lambda p: p.grad.zero_(),
    "lists of both": lambda p: torch._foreach_lerp_([p.data, p.grad], [p.data * 2, p.data * 3], 0.1),
    "a view that follows": _view_and_change,
}


def _places(group):
    for name, rule in RULES.items():
        yield name, ShardPlace(rule, group), lambda full, rule=rule: rule.split(full, group.rank)
    elements = Shard.of_sizes((40, 20))
    slices = Slices(elements, group, torch.Size((ROWS, COLUMNS)))

    def sliced(full):
        return elements.split(full.reshape(-1), group.rank).view(-1, 1)

    yield "slices", ShardPlace(None, group, slices), sliced


def _pair(cut):
    generator = torch.Generator().manual_seed(2)
    full, gradient = torch.randn(2, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    alone, mine = nn.Parameter(full.clone()), nn.Parameter(cut(full))
    alone.grad, mine.grad = gradient.clone(), cut(gradient)
    return alone, mine


@distributed(world_size=2)
def test_functions_of_a_shown_parameter_equal_the_full_one(group):
    exact = {"rtol": 1e-9, "atol": 1e-11}
    for label, place, cut in _places(group):
        for name, function in (*READS.items(), *WRITES.items()):
            alone, mine = _pair(cut)
            torch.manual_seed(5)
            with torch.no_grad():
                expected = function(alone)
            ShardedTensor.show(mine, place)
            torch.manual_seed(5)
            with torch.no_grad():
                found = without_pieces(function(mine))
            ShardedTensor.hide(mine)
            message = f"{label}: {name}"
            if name in READS:
                with torch.no_grad():
                    torch.testing.assert_close(found, expected, **exact, msg=lambda text, at=message: f"{at}: {text}")
            assert type(mine) is nn.Parameter, message
            torch.testing.assert_close(
                mine.data, cut(alone.data), **exact, msg=lambda text, at=message: f"{at}: {text}"
            )
            torch.testing.assert_close(
                mine.grad, cut(alone.grad), **exact, msg=lambda text, at=message: f"{at}: {text}"
            )


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_shown_parameter_keeps_its_object_and_its_errors(group):
    for _, place, cut in _places(group):
        _, mine = _pair(cut)
        by_parameter, is_trained = {mine: 1}, mine.requires_grad
        ShardedTensor.show(mine, place)
        assert isinstance(mine, nn.Parameter)
        assert by_parameter[mine] == 1
        for change in (lambda p: p.mul_(2), lambda p: p.__setitem__(0, 1.0), lambda p: p.zero_()):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                change(mine)
        with pytest.raises(ValueError, match="read-only"):
            mine.detach().numpy()[:] = 0
        assert mine.data_ptr() == mine.data_ptr() != 0
        mine.requires_grad = False
        assert not mine.requires_grad
        mine.requires_grad_(is_trained)
        ShardedTensor.hide(mine)
        assert mine.requires_grad


@distributed(world_size=2)
def test_element_wise_code_and_norms_gather_nothing(group):
    for label in ("rows", "columns", "packed"):
        place = ShardPlace(RULES[label], group)
        _, mine = _pair(lambda full, rule=RULES[label]: rule.split(full, group.rank))
        ShardedTensor.show(mine, place)
        with torch.no_grad(), recorded_communication() as records:
            mine.mul_(0.9).add_(mine.grad, alpha=0.1)
            mine.grad.sub_(0.1 * mine.data.sign())
            mine.div_(1 + mine.norm() + mine.sum() + mine.abs().max())
        assert max(record.bytes for record in records) <= 8 * group.size, (label, records)

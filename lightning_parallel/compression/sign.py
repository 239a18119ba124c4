"""One bit per element."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from lightning_parallel.compression.bits import pack_signs, unpack_signs
from lightning_parallel.compression.codec import as_bytes, by_rank, from_bytes
from lightning_parallel.compression.compressor import Compressor
from lightning_parallel.compression.exchange import Exchange, Gather, Swap, Traffic
from lightning_parallel.compression.feedback import Block, FeedbackName
from lightning_parallel.compression.reducer import Step

__all__ = ["Sign"]


class Sign(Compressor):
    """Send one bit per element and one scale per tensor, in the two phases of `Quantize`.

        C(x) = s sign(x),  s = mean|x|,  sign(0) = 1

    Both phases have their own residual: each rank for its tensors, and the owner of part r for the mean it encodes,

        M_i = g_i + e_i        c = mean(C(M_i)) + d        out = C(c)        d' = c - C(c)

    Not linear, biased; it needs error feedback to converge. On a small CNN of 500 steps the loss ended 1.3 % above the
    dense one, and within 0.1 % with `start_step=50`. It does not suit AdamW, which makes full steps of what one bit
    adds to elements without a gradient: a small GPT of 600 steps ended 43 % above, with dense embeddings and
    `start_step=50` 15 %.

    Args:
        feedback: Error feedback; None turns off both residuals.
        decay: How much of the old residual `decayed` keeps, in [0, 1); 0.5 when omitted.
        start_step: Steps with plain means before compression begins.
        min_numel: Tensors with fewer elements, and those of less than two dimensions, are averaged as they are.

    Sources: EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847; two phases: 1-bit Adam, arXiv 2102.02888.
    """

    linear = False
    unbiased = False
    collective = "two_phase"
    own_slots = frozenset({"server_residual"})

    def __init__(
        self,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        start_step: int = 0,
        min_numel: int = 1024,
    ) -> None:
        super().__init__(feedback, decay, start_step, min_numel)

    @property
    def scatters(self) -> bool:
        return self.feedback.kind != "ef21"  # which remembers the whole mean

    def compress(self, work: Tensor, block: Block, step: Step) -> Exchange:
        rows, size = work.flatten(1), step.group.size
        n, shard = rows.shape[1], block.shard or _chunk(rows.shape[1], size)
        scales = rows.abs().mean(1).float()
        parts = by_rank(rows, size, shard)
        bits = pack_signs(torch.nn.functional.pad(parts, (0, _chunk(shard, 1) - shard)))
        send = torch.cat([bits, as_bytes(scales.unsqueeze(1)).expand(size, -1, -1)], dim=2)
        received = (yield Swap(send.view(size, -1))).reshape(send.shape)
        mine = _mean_of((_decode(part, rows.dtype) for part in received), size)
        if block.keep_rest:
            sent = unpack_signs(bits, rows.dtype)[..., :shard].transpose(0, 1).flatten(1)[:, :n]
            rows.sub_(sent * scales.to(rows.dtype).unsqueeze(1))
        if block.shard is not None:
            step.watch(mine)
            block.write_shard(mine, step.group.rank)
            return
        everyone = yield Gather(self._encode_part(mine, n, block, step).flatten())
        everyone = _decode(everyone.reshape(size, len(rows), -1), rows.dtype)
        step.watch(everyone)
        block.write(everyone.transpose(0, 1).flatten(1)[:, :n])

    def scatter_traffic(self, shard: int, element_bytes: int, world_size: int) -> list[Traffic]:
        return [Traffic("all_to_all", world_size * (_chunk(shard, 1) // 8 + 4))]

    def traffic(self, shape: Sequence[int], element_bytes: int, world_size: int, step: int) -> list[Traffic]:
        chunk_bytes = _chunk(math.prod(shape), world_size) // 8 + 4
        return [Traffic("all_to_all", world_size * chunk_bytes), Traffic("all_gather", chunk_bytes)]

    @staticmethod
    def _encode_part(part: Tensor, n: int, block: Block, step: Step) -> Tensor:
        """Encode this rank's part (names, chunk) of the mean, with its residual."""
        chunk = part.shape[1]
        valid = min(max(n - step.group.rank * chunk, 0), chunk)
        part[:, valid:] = 0
        if block.keep_rest:
            held = [step.memory.read("server_residual", name, block.device, (chunk,)) for name in block.names]
            for row, old in zip(part, held):
                if old is not None:
                    row.add_(old)
        scales = (part.abs().sum(1) / max(valid, 1)).float()
        bits = pack_signs(part)
        if block.keep_rest:
            staged = step.memory.stage("server_residual", block.names, (chunk,), part.dtype, part.device)
            torch.addcmul(
                part, unpack_signs(bits, part.dtype), scales.to(part.dtype).unsqueeze(1), value=-1, out=staged
            )
            staged[:, valid:] = 0
        return torch.cat([bits, as_bytes(scales.unsqueeze(1))], dim=1)


def _mean_of(tensors: Iterator[Tensor], count: int) -> Tensor:
    """The mean of `count` tensors, summed in order; the first is overwritten."""
    total = next(tensors)
    for other in tensors:
        total.add_(other)
    return total.div_(count)


def _decode(messages: Tensor, dtype: torch.dtype) -> Tensor:
    scales = from_bytes(messages[..., -4:], torch.float32).to(dtype)
    return unpack_signs(messages[..., :-4], dtype).mul_(scales)


def _chunk(n: int, size: int) -> int:
    """Elements of each rank's part: whole bytes."""
    return 8 * math.ceil(n / (8 * size))

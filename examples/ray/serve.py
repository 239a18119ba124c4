"""Serve a model that was trained in parts: `python examples/ray/serve.py CHECKPOINT`, as `train.py` prints it.

The parts are read as they are: `load_weights` takes a sharded checkpoint, as it takes a full one. For other tools,
`lightning-parallel checkpoint export` writes ordinary weights, and `merge` an ordinary Lightning checkpoint.
"""

import sys
import time

import torch
from ray import serve
from starlette.requests import Request
from train import Net

from lightning_parallel import load_weights


@serve.deployment
class Predictor:
    """Answers `{"x": rows}` with the model's outputs."""

    def __init__(self, checkpoint: str) -> None:
        self.model = Net().eval()
        load_weights(self.model, checkpoint)

    async def __call__(self, request: Request) -> list[list[float]]:
        rows = (await request.json())["x"]
        with torch.inference_mode():
            return self.model(torch.tensor(rows)).tolist()


if __name__ == "__main__":
    serve.run(Predictor.bind(f"{sys.argv[1]}/checkpoint.ckpt"))
    print("curl -d '{\"x\": [[0.1, ...16 numbers]]}' http://127.0.0.1:8000/")
    while True:
        time.sleep(60)

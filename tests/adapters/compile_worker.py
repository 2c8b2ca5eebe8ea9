"""Run by test_conformance.py in a process of its own, because the tests' shape checker cannot be traced by Dynamo.

python -m tests.adapters.compile_worker LABEL …       prints one JSON object: label -> "" or what is wrong
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

from earnest.adapters import attach, conformance
from earnest.adapters.variant import get_variant


class Small(nn.Module):
    """Two adapted layers around a nonlinearity: compiles in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(self.table(input_ids))))
        return out


def fault(label: str) -> str:
    """fullgraph=True: value and gradients with the gate open, and the base with the gate closed."""
    name, settings = conformance.SUBJECTS[label]
    variant, model, ids = get_variant(name, **settings), Small(), torch.arange(12).view(2, 6)
    adapter = attach(model, variant, targets=["up", "down"], calibration=[ids] if variant.wants_calibration() else None)
    conformance.kick(adapter)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        for p in adapter.parameters():
            p.grad = None
        out = run(ids)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(p.grad for p in adapter.parameters())])
    for a, b in zip(*results, strict=True):
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
            return f"differs by {float((a - b).abs().max()):.1e}"
    with adapter.off():
        return "" if torch.equal(compiled(ids), model(ids)) else "off() differs"


def main() -> None:
    torch.set_num_threads(1)
    out = {}
    for label in sys.argv[1:]:
        try:
            if label == "whole model":
                variant = get_variant("dora", rank=4)
                conformance.compiling(conformance.Case(variant, conformance.tiny_llama))
                out[label] = ""
            else:
                out[label] = fault(label)
        except Exception as e:  # a graph break arrives as one of Dynamo's many errors
            out[label] = f"{type(e).__name__}: {e}"[:2000]
    print(json.dumps(out))


if __name__ == "__main__":
    main()

"""Run by test_conformance.py in a process of its own, because the tests' shape checker cannot be traced by Dynamo.

python -m tests.adapters.compile_worker LABEL …       prints one JSON object: label -> "" or what is wrong
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from earnest.adapters import LoRA, conformance, kernel
from earnest.adapters.conformance import Case
from earnest.adapters.kernel import Factors
from earnest.adapters.variant import get_variant


class Small(nn.Module):
    """Two adapted layers around a nonlinearity: compiles in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64, bias=False)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.down(nn.functional.gelu(self.up(self.table(input_ids)))))


class Breaks(LoRA):
    """Reads a number from a tensor, so it compiles into two graphs."""

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["B"], self.s * scale * (1.0 if float(t["B"].sum()) < 1e9 else 0.0))


class Differs(LoRA):
    """Uses another scale when compiled."""

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["B"], self.s * scale * (1.01 if torch.compiler.is_compiling() else 1.0))


HALF = {"lora in bf16": "lora", "ia3 in bf16": "ia3"}  # kernels that are only used with a cast
MUTANTS = {"breaks the graph": Breaks(rank=4), "differs when compiled": Differs(rank=4)}


def fault(label: str) -> str:
    """The check of the table: value and gradients at scale 1, and the base at scale 0."""
    if label == "whole model":
        case = Case(get_variant("dora", rank=4), conformance.tiny_llama)
    elif label in HALF:
        name, settings = conformance.SUBJECTS[HALF[label]]
        case = Case(get_variant(name, **settings), Small, torch.bfloat16, targets=["up", "down"])
    elif label in MUTANTS:
        case = Case(MUTANTS[label], Small, targets=["up", "down"])
    else:
        name, settings = conformance.SUBJECTS[label]
        case = Case(get_variant(name, **settings), Small, targets=["up", "down"])
    try:
        conformance.compiling(case)
    except conformance.Broken as e:
        return f"Broken: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:2000]
    return ""


def main() -> None:
    torch.set_num_threads(1)
    kernel.SMALL = 0  # use the kernels' own backward, as with many tokens
    print(json.dumps({label: fault(label) for label in sys.argv[1:]}))


if __name__ == "__main__":
    main()

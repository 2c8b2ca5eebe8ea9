"""Steps with compiled layers, in a process without the tests' shape checks, which cannot be compiled.

python -m tests.engines.compile_worker [inductor]       prints one JSON object
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import earnest as en
from earnest.adapters.conformance import perturb, tiny_llama
from earnest.engines import local
from earnest.engines.compiling import CompiledLayers
from tests.engines.words import word_tokenizer

GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(len(inputs))
    return graph


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler here")


def engine(backend: Any, **settings: Any) -> en.LocalEngine:
    local.CompiledLayers = lambda body: CompiledLayers(body, backend)  # type: ignore[assignment,misc]
    policy = en.Policy.of(tiny_llama(), word_tokenizer(64))
    adapter = en.attach(policy, en.LoRA(rank=4), targets="all-linear")
    perturb(adapter)
    return en.LocalEngine(policy, adapter, micro_tokens=16, **settings)


def batch() -> en.Batch:
    rows = [([5, 6, 7], [10, 11]), ([8, 9], [12, 13, 14]), ([3], [4] * 9)]
    return en.Batch.from_rows([p for p, _ in rows], [c for _, c in rows], role="demonstration")


def compare(backend: Any, **settings: Any) -> dict[str, Any]:
    """The largest relative difference of a gradient from the eager one, and the layout of a step."""
    want = engine(None).gradients(batch(), en.SFT())
    torch._dynamo.reset()
    GRAPHS.clear()
    made = engine(backend, compile=True, **settings)
    got = made.gradients(batch(), en.SFT())
    apart = max(float((got[n] - g).norm() / g.norm()) for n, g in want.items())
    layout = made.step(batch(), en.SFT()).layout
    sampled = len(made.sample([[5, 6]], 2, en.SampleSpec(max_new_tokens=2)))
    return {"apart": apart, "layout": layout, "graphs": len(GRAPHS), "sampled": sampled}


if __name__ == "__main__":
    if sys.argv[1:] == ["inductor"]:
        print(json.dumps({"inductor": compare("inductor")}))
    else:
        cases = {
            "compiled": compare(counting),
            "checkpointed": compare(counting, checkpoint_activations=True),
            "broken": compare(broken),
        }
        print(json.dumps(cases))

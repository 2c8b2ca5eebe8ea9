"""Combining LoRA adapters with a negative weight: the sign lands on both factors. huggingface/peft#3004, https://github.com/huggingface/peft/issues/3004, 2026.
add_weighted_adapter with combination_type="linear" splits a weight over the factors A and B as a square root each. For negative weights the
sign was put on both factors, so it cancels in B @ A: a weight of -1 gives the same merged adapter as +1, and forgetting by task negation
silently adds the adapter instead. Fixed by putting the sign on the A factor only."""
import math

import torch

FAMILY = "adapters, merging and low precision"
KIND = "adapter"
INPUTS = {"base": "frozen torch.nn.Linear", "adapters": "list with one LoRA adapter: dict with A [r, in], B [out, r] and scaling (float)",
          "weights": "list with one weight per adapter, here [-0.7]"}
SETTINGS = {}
NOTES = ("returns a module: base layer plus the merged adapter, x -> base(x) + x @ (merged_B @ merged_A).T. With one adapter the merged change of the weight is "
         "weight * scaling * B @ A, for weights of either sign. (With several adapters 'linear' sums the A and the B separately, which has cross terms by design; "
         "this case has one.) The base weight is frozen; A and B of the merged adapter are trainable.")


class Merged(torch.nn.Module):
    def __init__(self, base, A, B):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A, self.lora_B = torch.nn.Parameter(A), torch.nn.Parameter(B)

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def make(seed):
    torch.manual_seed(seed)
    return {"base": torch.nn.Linear(10, 8),
            "adapters": [{"A": torch.randn(3, 10) * 0.3, "B": torch.randn(8, 3) * 0.3, "scaling": 2.0}], "weights": [-0.7]}


def broken(base, adapters, weights):
    A = B = 0
    for a, w in zip(adapters, weights):
        factor = math.copysign(math.sqrt(abs(w) * a["scaling"]), w)
        A, B = A + factor * a["A"], B + factor * a["B"]
    return Merged(base, A, B)


def right(base, adapters, weights):
    A = B = 0
    for a, w in zip(adapters, weights):
        factor = math.sqrt(abs(w) * a["scaling"])
        A, B = A + math.copysign(factor, w) * a["A"], B + factor * a["B"]
    return Merged(base, A, B)


if __name__ == "__main__":
    case = make(0)
    a = case["adapters"][0]
    want = case["weights"][0] * a["scaling"] * a["B"] @ a["A"]
    for fn in (broken, right):
        m = fn(**case)
        print(fn.__name__, "change of the weight [0, :3]", (m.lora_B @ m.lora_A)[0, :3].tolist(), "wanted", want[0, :3].tolist())
    assert torch.allclose(m.lora_B @ m.lora_A, want, atol=1e-6)

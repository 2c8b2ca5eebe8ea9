"""Global MoE balance loss divides cumulative expert counts by the current micro-batch's tokens. NVIDIA/Megatron-LM#7213 (first #7197, fix #7214), https://github.com/NVIDIA/Megatron-LM/issues/7213, 2026.
The global_aux_loss accumulates the tokens per expert over all micro-batches of a step, divides by the number of micro-batches seen, and then normalizes with
the valid token count of the *current* micro-batch. With unequal valid-token counts the frequencies no longer sum to one, so the strength of the balance
gradient depends on how the tokens were cut into micro-batches. The fix also accumulates the valid-token count."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "update"
INPUTS = {"model": "one MoE layer with a top-k router, then a head", "optimizer": "SGD over all parameters",
          "batches": "micro-batches of one optimizer step: x [tokens, width], valid [tokens] bool (padding is False), y [tokens] class"}
SETTINGS = {"coeff": "weight of the balance loss, 0.1", "topk": "experts per token, 2"}
NOTES = ("One optimizer step. Main loss: cross-entropy, mean over all valid tokens of the step. Balance loss of a micro-batch: E * sum_e f_e * p_e with p the mean router "
         "probability of this micro-batch's valid tokens and f the running frequency of the expert over all micro-batches of the step so far (a constant, sums to 1); "
         "averaged over micro-batches. The running prefix is intended. No clipping.")


class MoE(nn.Module):
    def __init__(self, width=8, experts=4, classes=5):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, classes)

    def forward(self, x, topk):
        probs = self.router(x).softmax(-1)
        top = probs.topk(topk, dim=-1)
        gate = torch.zeros_like(probs).scatter(1, top.indices, top.values)
        mixed = sum(gate[:, e:e + 1] * expert(x) for e, expert in enumerate(self.experts))
        return self.head(x + mixed), probs, gate > 0


def make(seed):
    torch.manual_seed(seed)
    model = MoE()
    batches = []
    for n_valid in (12, 3, 7, 10):
        valid = torch.zeros(12, dtype=torch.bool)
        valid[:n_valid] = True
        batches.append({"x": torch.randn(12, 8) + 0.5, "valid": valid, "y": torch.randint(0, 5, (12,))})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def broken(model, optimizer, batches, coeff=0.1, topk=2):
    optimizer.zero_grad()
    total = sum(int(b["valid"].sum()) for b in batches)
    counts, seen = 0, 0
    for b in batches:
        logits, probs, chosen = model(b["x"], topk)
        v = b["valid"]
        tokens = int(v.sum())
        counts = counts + chosen[v].sum(0).float()
        seen += 1
        frequency = (counts / seen) / (topk * tokens)
        aux = probs.shape[1] * (frequency * probs[v].sum(0) / tokens).sum()
        main = F.cross_entropy(logits[v], b["y"][v], reduction="sum") / total
        (main + coeff * aux / len(batches)).backward()
    optimizer.step()


def right(model, optimizer, batches, coeff=0.1, topk=2):
    optimizer.zero_grad()
    total = sum(int(b["valid"].sum()) for b in batches)
    counts, seen_tokens = 0, 0
    for b in batches:
        logits, probs, chosen = model(b["x"], topk)
        v = b["valid"]
        tokens = int(v.sum())
        counts = counts + chosen[v].sum(0).float()
        seen_tokens += tokens
        frequency = counts / (topk * seen_tokens)
        aux = probs.shape[1] * (frequency * probs[v].sum(0) / tokens).sum()
        main = F.cross_entropy(logits[v], b["y"][v], reduction="sum") / total
        (main + coeff * aux / len(batches)).backward()
    optimizer.step()


if __name__ == "__main__":
    out = {}
    for f in (broken, right):
        d = make(0)
        f(**d)
        out[f.__name__] = d["model"].router.weight.detach().clone()
        print(f.__name__, "router grad norm", float(d["model"].router.weight.grad.norm()))
    print("difference of the router weights", float((out["broken"] - out["right"]).abs().max()))
    assert not torch.allclose(out["broken"], out["right"])

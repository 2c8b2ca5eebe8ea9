"""Tied weights saved once (safetensors / transformers): the output layer shares the embedding tensor, so its key is left out of the checkpoint, loading is non-strict for exactly this key, and the tie is made again afterwards. A missing key is right here."""
import torch
from torch import nn

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"model": "language model whose output layer shares the embedding weight (trained)", "fresh": "a new model of the same class with other weights, not yet tied"}
SETTINGS = {}
NOTES = ("Saves model and loads it into fresh; returns (checkpoint dict, fresh). A tensor that several names share is stored once, under the first name in module order; the other name is absent. After the load the missing names must be exactly the tied ones, "
         "else an error is raised; fresh.out.weight IS fresh.emb.weight again (the same Parameter object, so an optimizer made afterwards has it once and its gradient is the sum of both uses). fresh then computes the same logits as model.")


class LM(nn.Module):
    tied = {"out.weight": "emb.weight"}

    def __init__(self, v=20, d=8, tie=True):
        super().__init__()
        self.emb, self.mid, self.out = nn.Embedding(v, d), nn.Linear(d, d), nn.Linear(d, v, bias=False)
        if tie:
            self.tie()

    def tie(self):
        self.out.weight = self.emb.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.mid(self.emb(ids))))


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM(), "fresh": LM(tie=False)}


def right(model, fresh):
    seen, ckpt = set(), {}
    for name, t in model.state_dict(keep_vars=True).items():
        if id(t) in seen:
            continue
        seen.add(id(t))
        ckpt[name] = t.detach().clone()
    missing, unexpected = fresh.load_state_dict(ckpt, strict=False)
    if set(missing) != set(fresh.tied) or unexpected:
        raise RuntimeError((missing, unexpected))
    fresh.tie()
    return ckpt, fresh


if __name__ == "__main__":
    i = make(0); c, f = right(**i)
    ids = torch.arange(20)
    print(sorted(c), "same tensor", f.out.weight is f.emb.weight, "parameters", len(list(f.parameters())), "logits error", (f(ids) - i["model"](ids)).abs().max().item())
    f(ids).logsumexp(-1).mean().backward(); print("gradient", f.emb.weight.grad.norm().item())

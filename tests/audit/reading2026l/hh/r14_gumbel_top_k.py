"""Stochastic beam search (Kool, van Hoof, Welling 2019, arXiv 1903.06059): k *different* sequences are drawn without replacement in one beam search, by Gumbel noise on
the sequence log-probs, with the maximum of the children conditioned on the parent's value. The log-probs are those of the model, without noise."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal LM, ids [rows, time] -> logits [rows, time, vocabulary]", "prompt_ids": "[1, prompt length]", "settings": "dict, see SETTINGS"}
SETTINGS = {"k": "number of sequences, 5", "length": "tokens per sequence, 3", "seed": "0"}
NOTES = """(model, prompt_ids, settings) -> ids [k, length], logprobs [k, length]. A sample of k sequences of fixed length without replacement from the model's distribution over all sequences
(so the rows are pairwise different; k must not exceed vocabulary ** length), sorted by their perturbed log-probability, the first row being an exact sample of the model. Each
node keeps phi, the log-probability of its prefix, and G, a Gumbel of location phi; the Gumbels of the children are drawn with their maximum conditioned to
be G of the parent; the k largest children survive. logprobs[i, t] = log-softmax of the model for ids[i, t] given the prompt and ids[i, :t], unperturbed, at temperature 1;
the rows are no independent samples: an estimator has to weigh them by inclusion probabilities, which is not done here. No stop token. No gradient."""
import math
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=6, d=12):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0]) * 8


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM(), "prompt_ids": torch.randint(0, 6, (1, 3)), "settings": {"k": 5, "length": 3, "seed": seed}}


@torch.no_grad()
def right(model, prompt_ids, settings):
    gen, k = torch.Generator().manual_seed(settings["seed"]), settings["k"]
    ids = prompt_ids
    phi, G, token_lp = torch.zeros(1, dtype=torch.double), torch.zeros(1, dtype=torch.double), torch.zeros(1, 0)
    for _ in range(settings["length"]):
        lp = model(ids)[:, -1].log_softmax(-1)
        child_phi = phi[:, None] + lp.double()
        u = torch.rand(child_phi.shape, generator=gen, dtype=torch.double).clamp(1e-300, 1 - 1e-16)
        g = child_phi - (-u.log()).log()
        Z = g.max(1, keepdim=True).values
        v = G[:, None] - g + torch.log1p(-torch.exp((g - Z).clamp(max=0)))      # -inf at the argmax
        child_G = G[:, None] - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
        G, flat = child_G.flatten().topk(min(k, child_G.numel()))
        parent, tok = flat // lp.shape[1], flat % lp.shape[1]
        phi = child_phi.flatten()[flat]
        token_lp = torch.cat([token_lp[parent], lp[parent, tok][:, None]], 1)
        ids = torch.cat([ids[parent], tok[:, None]], 1)
    return ids[:, prompt_ids.shape[1]:], token_lp


if __name__ == "__main__":
    x = make(0)
    ids, lp = right(**x)
    full = torch.cat([x["prompt_ids"].expand(5, -1), ids], 1)
    ref = x["model"](full)[:, 2:-1].log_softmax(-1).gather(2, ids[..., None])[..., 0]
    print(ids.tolist(), "largest difference of log-probs", (lp - ref).abs().max().item())
    assert torch.allclose(lp, ref, atol=1e-5) and len({tuple(r) for r in ids.tolist()}) == 5
    x["settings"]["length"], N = 2, 3000
    first, second = torch.zeros(36), torch.zeros(36)
    for s in range(N):
        a = right(x["model"], x["prompt_ids"], {**x["settings"], "k": 2, "seed": s})[0]
        first[a[0, 0] * 6 + a[0, 1]] += 1 / N
        second[a[1, 0] * 6 + a[1, 1]] += 1 / N
    p1 = x["model"](x["prompt_ids"])[0, -1].softmax(-1).detach()
    p2 = x["model"](torch.cat([x["prompt_ids"].expand(6, -1), torch.arange(6)[:, None]], 1))[:, -1].softmax(-1).detach()
    p = (p1[:, None] * p2).flatten()
    want2 = torch.stack([sum(p[i] * p[j] / (1 - p[i]) for i in range(36) if i != j) for j in range(36)])
    tv = lambda a, b: (a - b).abs().sum().item() / 2
    print("total variation: first row to the model", tv(first, p), "second row to sampling without replacement", tv(second, want2), "| second row to the model", tv(second, p))
    assert tv(first, p) < .05 and tv(second, want2) < .06

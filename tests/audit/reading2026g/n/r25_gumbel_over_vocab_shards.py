"""Sampling from a sharded vocabulary without gathering the logits. Each rank adds Gumbel noise of its OWN seed to its slice and the largest of the ranks' maxima wins, an exact softmax sample (Gumbel-max); ranks with different seeds are required here, equal seeds would correlate the slices."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "sampler"
INPUTS = {"model": "tiny causal model, vocabulary 40", "prompt_ids": "1-D ids", "settings": "dict: ranks, temperature, new, seed"}
SETTINGS = {"ranks": "4, divides the vocabulary", "temperature": "0.8", "new": "tokens to write, 6", "seed": "rank r uses seed*1000 + r"}
NOTES = "Returns prompt + new ids, and log-probabilities of the new tokens only, of the tempered distribution, by log-sum-exp over ranks. argmax appears, but the result is a random sample. Global random state is untouched."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    torch.manual_seed(seed)
    return {"model": Tiny(), "prompt_ids": torch.randint(0, 40, (4,)), "settings": {"ranks": 4, "temperature": .8, "new": 6, "seed": seed}}

def pick(logits, gens):
    shards = logits.double().chunk(len(gens))
    best = []
    for r, (s, g) in enumerate(zip(shards, gens)):
        u = torch.rand(s.shape, generator=g, dtype=torch.double).clamp(min=1e-300)
        v, i = (s - (-u.log()).clamp(min=1e-300).log()).max(-1)
        best.append((float(v), r * len(s) + int(i)))
    tok = max(best)[1]
    lse = torch.stack([s.logsumexp(-1) for s in shards]).logsumexp(0)
    return tok, float(logits[tok].double() - lse)

@torch.no_grad()
def right(model, prompt_ids, settings):
    gens = [torch.Generator().manual_seed(settings["seed"] * 1000 + r) for r in range(settings["ranks"])]
    ids, lps = prompt_ids.tolist(), []
    for _ in range(settings["new"]):
        tok, lp = pick(model(torch.tensor([ids]))[0, -1] / settings["temperature"], gens)
        ids.append(tok); lps.append(lp)
    return torch.tensor(ids), torch.tensor(lps)

if __name__ == "__main__":
    d = make(0); ids, lp = right(**d); full = (d["model"](ids[None])[0] / .8).log_softmax(-1)
    assert all(abs(full[t - 1, ids[t]].item() - lp[t - 4].item()) < 1e-4 for t in range(4, 10)) and torch.equal(ids, right(**d)[0])
    logits = torch.tensor([0., 1, 2, -1, .5, 1.5, 0, 1]); gens = [torch.Generator().manual_seed(r) for r in range(4)]; n = 4000
    f = torch.zeros(8)
    for _ in range(n):
        f[pick(logits, gens)[0]] += 1 / n
    print((f - logits.softmax(0)).abs().max().item()); assert (f - logits.softmax(0)).abs().max() < .03

"""Self-speculative sampling with an early-exit draft (Leviathan et al. 2023, LayerSkip). Tokens come from the DRAFT head and are rejected at random; a rejected one is replaced by a draw from max(p - q, 0), not from p. The ids are
distributed exactly as if drawn from the full model, and the returned log-probabilities are the full model's, never the draft's."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"prompt": "token ids of one prompt, [time]", "seed": "seed of the generator"}
SETTINGS = {"new": "tokens to generate, 6", "draft": "tokens drafted at a time, 3 (changes speed only, not the distribution)", "temperature": "temperature of the sampled distribution, 1.0"}
NOTES = ("Returns ids [new] and log-probabilities [new] of the tempered full model (temperature 1.0 here). A fixed number of tokens, no end token. The number of draws from the generator depends on acceptances, so two values of draft "
         "give different ids for one seed, yet the same distribution.")
import torch
import torch.nn as nn


class TwoExit(nn.Module):
    def __init__(self, vocab=6, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.low = nn.GRU(width, width, batch_first=True)
        self.high = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, early=False):
        h = self.low(3 * self.emb(ids))[0]
        return self.head(2 * h) if early else self.head(2 * h + 5 * self.high(h)[0])


def make(seed):
    torch.manual_seed(seed)
    return {"model": TwoExit(), "prompt": torch.randint(0, 6, (4,)), "seed": seed}


@torch.no_grad()
def right(model, prompt, seed=0, new=6, draft=3, temperature=1.0):
    g = torch.Generator().manual_seed(seed)
    ids, logps = prompt.clone(), []

    def draw(p):
        return int(torch.multinomial(p, 1, generator=g))

    while len(logps) < new:
        start, guess, qs = len(ids), ids, []
        for _ in range(draft):
            q = (model(guess[None], early=True)[0, -1] / temperature).softmax(-1)
            qs.append(q)
            guess = torch.cat([guess, torch.tensor([draw(q)])])
        lp = (model(guess[None])[0, start - 1:] / temperature).log_softmax(-1)
        for k in range(draft + 1):
            p = lp[k].exp()
            if k == draft:
                tok, ok = draw(p), False                       # all accepted: one more token for free
            else:
                tok = int(guess[start + k])
                ok = float(torch.rand((), generator=g)) < float(p[tok] / qs[k][tok])
                if not ok:
                    rest = (p - qs[k]).clamp(min=0)
                    tok = draw(rest if float(rest.sum()) > 0 else p)   # rest is empty only through rounding
            ids = torch.cat([ids, torch.tensor([tok])])
            logps.append(float(lp[k, tok]))
            if not ok:
                break
    return ids[len(prompt):len(prompt) + new], torch.tensor(logps[:new])


if __name__ == "__main__":
    import itertools
    d = make(0)
    m, prompt = d["model"], d["prompt"]
    ids, lps = right(m, prompt, 5)
    full = m(torch.cat([prompt, ids])[None])[0].log_softmax(-1)
    want = torch.stack([full[len(prompt) - 1 + k, ids[k]] for k in range(6)])
    assert torch.allclose(lps, want, atol=1e-5)
    n, count = 3000, torch.zeros(6, 6)
    for s in range(n):
        a, b = right(m, prompt, s, new=2, draft=2)[0].tolist()
        count[a, b] += 1
    exact = torch.zeros(6, 6)
    for a, b in itertools.product(range(6), repeat=2):
        l = m(torch.cat([prompt, torch.tensor([a, b])])[None])[0].log_softmax(-1).detach()
        exact[a, b] = float((l[len(prompt) - 1, a] + l[len(prompt), b]).exp())
    drafted = m(prompt[None], early=True)[0, -1].softmax(-1).detach()
    print("total variation: sampled to full model %.3f, draft to full model (first token) %.3f" % (0.5 * float((count / n - exact).abs().sum()), 0.5 * float((drafted - exact.sum(1)).abs().sum())))
    assert 0.5 * float((count / n - exact).abs().sum()) < 0.07

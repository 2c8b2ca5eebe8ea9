"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023). Draft tokens are accepted with min(1, p/q), the first refusal is redrawn from the RESIDUAL max(p-q, 0), and after full acceptance one extra token is drawn.
The log probabilities returned are the TARGET's, not those of the distribution each token was really drawn from: the outcome is distributed exactly like the target."""
FAMILY = "sampler"
KIND = "sampler"
INPUTS = {"model": "target language model", "prompt": "prompt ids, [time]"}
SETTINGS = {"new": "tokens to produce, 6", "draft_len": "tokens per draft, 3", "temperature": "1.0 for target and draft alike", "seed": "seed of the generator, 0"}
NOTES = "Returns (new ids, target log probabilities of them at the same temperature). The draft here is the target's logits flattened (times 0.3) to stay self-contained; any draft is right. A batch of one row. No end-of-text handling. Uses its own generator only."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = Tiny(vocab=7)
    with torch.no_grad():
        model.head.weight.mul_(6)
    return {"model": model, "prompt": torch.randint(0, 7, (3,), generator=g)}


@torch.no_grad()
def right(model, prompt, new=6, draft_len=3, temperature=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda p: int(torch.multinomial(p, 1, generator=g))
    ids, lps = prompt.tolist(), []
    want = len(ids) + new
    while len(ids) < want:
        k = min(draft_len, want - len(ids) - 1)
        tail, qs = list(ids), []
        for _ in range(k):
            qs.append((0.3 * model(torch.tensor([tail]))[0, -1] / temperature).softmax(-1)); tail.append(draw(qs[-1]))
        logp = (model(torch.tensor([tail]))[0] / temperature).log_softmax(-1)[len(ids) - 1:]     # one target pass
        for j in range(k + 1):
            p, refused = logp[j].exp(), False
            if j == k:
                tok = draw(p)                                                # the extra token
            else:
                tok = tail[len(ids)]
                refused = float(torch.rand((), generator=g)) * float(qs[j][tok]) >= float(p[tok])
                if refused:
                    tok = draw((p - qs[j]).clamp(min=0))
            ids.append(tok); lps.append(float(logp[j][tok]))
            if refused:
                break
    return torch.tensor(ids[len(prompt):]), torch.tensor(lps)


if __name__ == "__main__":
    d = make(0); model, prompt = d["model"], d["prompt"]
    for s in range(20):
        out, lp = right(model, prompt, seed=s)
        full = torch.cat([prompt, out])[None]
        assert len(out) == 6 and torch.allclose(lp, logps(model, full)[0, 2:].detach(), atol=1e-4)
    N, count = 2000, torch.zeros(7, 7)
    for s in range(N):
        o, _ = right(model, prompt, new=2, seed=s); count[o[0], o[1]] += 1
    with torch.no_grad():
        p0 = model(prompt[None])[0, -1].softmax(-1)
        exact = torch.stack([p0[a] * model(torch.cat([prompt, torch.tensor([a])])[None])[0, -1].softmax(-1) for a in range(7)])
    tv = 0.5 * float((count / N - exact).abs().sum())
    assert tv < 0.08, tv
    print("ok  total variation", tv)

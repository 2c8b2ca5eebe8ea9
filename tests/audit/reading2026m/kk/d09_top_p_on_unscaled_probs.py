"""Top-k/top-p cut before the temperature is applied and after each other. sgl-project/sglang-jax#1563,
https://github.com/sgl-project/sglang-jax/pull/1563 (issue #289), 2026. In the default mask path the temperature was applied after the masks, so top-p measured the unscaled distribution (the same
tokens were kept at every temperature), and top-k ran first, so top-p measured the distribution renormalised over the k tokens and kept too few. The sort path
was right; both were meant to sample from the same distribution."""
import torch
import torch.nn as nn

FAMILY = "samplers"
KIND = "sampler"
INPUTS = {
    "model": "causal language model, ids [rows, time] -> logits [rows, time, vocabulary]",
    "prompt_ids": "prompts of the same length, [rows, time]",
    "settings": "dict with temperature 1.6, top_k 8 (0 = off), top_p 0.7 (1 = off), max_new 12, seed",
}
SETTINGS = {}
NOTES = (
    "Samples max_new tokens per row. The distribution of a step is p = softmax(logits/temperature). Top-k keeps the k most probable tokens of p; top-p keeps the smallest set of "
    "most probable tokens of p whose total reaches top_p (the token that crosses the limit is kept). Both limits are measured on the full p, and a token must be in both sets. The kept "
    "probabilities are renormalised and sampled with a generator seeded by settings['seed']. Returns (ids of the new tokens [rows, max_new], log-probability of each under the "
    "renormalised distribution it was drawn from [rows, max_new]). No gradient; no stop token."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return 6 * self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Tiny(), "prompt_ids": torch.randint(0, 23, (4, 5), generator=g),
            "settings": {"temperature": 1.6, "top_k": 8, "top_p": 0.7, "max_new": 12, "seed": seed}}


def _keep(p, top_k, top_p):
    order = p.argsort(-1, descending=True)
    sp = p.gather(-1, order)
    ok = torch.ones_like(sp, dtype=torch.bool)
    if top_p < 1:
        ok &= (sp.cumsum(-1) - sp) < top_p
    if top_k:
        ok[..., top_k:] = False
    return torch.zeros_like(ok).scatter(-1, order, ok)


def _dist_broken(logits, s):
    p = logits.softmax(-1)
    keep = _keep(p, s["top_k"], 1.0)
    p = p.masked_fill(~keep, 0.0)
    p = p / p.sum(-1, keepdim=True)
    keep &= _keep(p, 0, s["top_p"])
    return (logits.masked_fill(~keep, float("-inf")) / s["temperature"]).softmax(-1)


def _dist_right(logits, s):
    p = (logits / s["temperature"]).softmax(-1)
    p = p.masked_fill(~_keep(p, s["top_k"], s["top_p"]), 0.0)
    return p / p.sum(-1, keepdim=True)


@torch.no_grad()
def _run(dist, model, prompt_ids, s):
    g = torch.Generator().manual_seed(s["seed"])
    ids, new, lps = prompt_ids, [], []
    for _ in range(s["max_new"]):
        p = dist(model(ids)[:, -1], s)
        tok = torch.multinomial(p, 1, generator=g)
        lps.append(p.gather(-1, tok).log())
        new.append(tok)
        ids = torch.cat([ids, tok], 1)
    return torch.cat(new, 1), torch.cat(lps, 1)


def broken(model, prompt_ids, settings):
    return _run(_dist_broken, model, prompt_ids, settings)


def right(model, prompt_ids, settings):
    return _run(_dist_right, model, prompt_ids, settings)


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        b, r = broken(**d), right(**d)
        lg = d["model"](d["prompt_ids"])[:, -1].detach()
        pb, pr = _dist_broken(lg, d["settings"]), _dist_right(lg, d["settings"])
        print("seed", s, "tokens that differ %.2f, kept tokens broken %s right %s, total variation %.3f" % (
            (b[0] != r[0]).float().mean(), (pb > 0).sum(-1).tolist(), (pr > 0).sum(-1).tolist(), 0.5 * (pb - pr).abs().sum(-1).mean()))
        if s == 0:
            assert (b[0] != r[0]).any() and (pb - pr).abs().max() > 1e-2
        for row in range(4):
            q = (lg[row] / 1.6).softmax(-1).tolist()
            got, tot = [], 0.0
            for i in sorted(range(23), key=lambda i: -q[i]):
                if tot >= 0.7 or len(got) == 8:
                    break
                got.append(i)
                tot += q[i]
            assert sorted(got) == (pr[row] > 0).nonzero()[:, 0].tolist()
        assert torch.isfinite(r[1]).all()

"""Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023): tokens are drawn from a draft model and the log-probs reported are those of
the target model; by the accept / residual rule the output is distributed exactly as if it came from the target."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "target causal LM, ids [1, time] -> logits [1, time, vocabulary]", "prompt_ids": "[1, prompt length]", "settings": "dict, see SETTINGS; settings['draft'] is a smaller causal LM of the same vocabulary"}
SETTINGS = {"draft": "the draft model", "gamma": "draft tokens per round, 3", "temperature": "of both models, 0.8", "max_new_tokens": "10", "seed": "0"}
NOTES = """(model, prompt_ids, settings) -> ids [max_new_tokens], logprobs [max_new_tokens]. Per round the draft q proposes gamma tokens; proposal x is accepted with probability
min(1, p(x) / q(x)), p the target; at the first rejection one token is drawn from max(p - q, 0) renormalised and the rest of the proposals is discarded; if all
are accepted one more token is drawn from p. Tokens beyond max_new_tokens are cut. ids are exactly distributed as ancestral sampling from the target at that temperature. logprobs[t]
is log p(ids[t] | prompt, ids[:t]) under the target at that temperature, whichever distribution (draft, residual or target) it was drawn from, since this
is the marginal law of the token. The draft's probabilities are not returned. No stop token. No gradient."""
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=12, d=16, scale=3.0):
        super().__init__()
        self.emb, self.rnn, self.head, self.scale = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v), scale

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0]) * self.scale


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM(), "prompt_ids": torch.randint(0, 12, (1, 4)), "settings": {"draft": LM(d=6), "gamma": 3, "temperature": 0.8, "max_new_tokens": 10, "seed": seed}}


@torch.no_grad()
def right(model, prompt_ids, settings):
    g = torch.Generator().manual_seed(settings["seed"])
    T, gamma, start = settings["temperature"], settings["gamma"], prompt_ids.shape[1]
    draw = lambda w: torch.multinomial(w, 1, generator=g)
    ids, lps = prompt_ids, []
    while len(lps) < settings["max_new_tokens"]:
        n, cur, qs = ids.shape[1], ids, []
        for _ in range(gamma):
            qs.append((settings["draft"](cur)[0, -1] / T).softmax(-1))
            cur = torch.cat([cur, draw(qs[-1])[None]], 1)
        logp = (model(cur)[0, n - 1:] / T).log_softmax(-1)         # gamma + 1 distributions
        p = logp.exp()
        for i in range(gamma + 1):
            rejected = False
            if i == gamma:
                tok = draw(p[i])
            else:
                tok = cur[0, n + i][None]
                rejected = bool(torch.rand(1, generator=g) * qs[i][tok] >= p[i][tok])
                if rejected:
                    tok = draw((p[i] - qs[i]).clamp(min=0))
            ids = torch.cat([ids, tok[None]], 1)
            lps.append(logp[i, tok])
            if rejected:
                break
    k = settings["max_new_tokens"]
    return ids[0, start:start + k], torch.cat(lps)[:k]


if __name__ == "__main__":
    x = make(0)
    ids, lp = right(**x)
    full = torch.cat([x["prompt_ids"], ids[None]], 1)
    ref = (x["model"](full)[0, 3:-1] / 0.8).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    print(ids.tolist(), "logprobs agree with the target", (lp - ref).abs().max().item())
    assert torch.allclose(lp, ref, atol=1e-5)
    N, c = 2500, torch.zeros(12, 12)
    for s in range(N):
        a = right(x["model"], x["prompt_ids"], {**x["settings"], "max_new_tokens": 2, "gamma": 2, "seed": s})[0]
        c[a[0], a[1]] += 1
    p1 = (x["model"](x["prompt_ids"])[0, -1] / .8).softmax(-1).detach()
    p2 = (x["model"](torch.cat([x["prompt_ids"].expand(12, -1), torch.arange(12)[:, None]], 1))[:, -1] / .8).softmax(-1).detach()
    joint = p1[:, None] * p2
    q1 = (x["settings"]["draft"](x["prompt_ids"])[0, -1] / .8).softmax(-1).detach()
    tv = lambda a, b: (a - b).abs().sum().item() / 2
    print("total variation of the pair to the target", tv(c / N, joint), "| first token: to target", tv(c.sum(1) / N, p1), "target to draft", tv(p1, q1))
    assert tv(c.sum(1) / N, p1) < 0.04 and tv(c / N, joint) < 0.1

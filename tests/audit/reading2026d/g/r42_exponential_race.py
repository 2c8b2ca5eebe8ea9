"""Sampling by an exponential race (gpt-fast, vLLM): argmax(p / Exp(1)) instead of multinomial. An argmax that is a fair sample; the log-probs belong to the TEMPERED distribution, since the trainer divides its logits by the same temperature."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal model", "prompt": "[rows, time]"}
SETTINGS = {"temperature": "0.7", "new": "tokens to sample, 4", "eos": "id 1; after it only padding 0 with log-prob 0"}
NOTES = "Log-prob of each sampled token, EOS included, under softmax(logits / temperature). Prompts of equal length. Uses the given generator seed."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def make(seed):
    torch.manual_seed(seed)
    return {"model": Tiny(), "prompt": torch.randint(2, V, (3, 3)), "settings": {"temperature": 0.7, "new": 4, "eos": 1, "seed": seed}}


@torch.no_grad()
def right(model, prompt, settings):
    gen = torch.Generator().manual_seed(settings["seed"])
    ids, out = prompt, []
    done = torch.zeros(len(prompt), dtype=torch.bool)
    for _ in range(settings["new"]):
        lp = (model(ids)[:, -1] / settings["temperature"]).log_softmax(-1)
        race = lp.exp() / torch.empty_like(lp).exponential_(generator=gen)
        tok = race.argmax(-1)
        got = lp.gather(1, tok[:, None])[:, 0]
        tok, got = tok.masked_fill(done, 0), got.masked_fill(done, 0.0)
        ids = torch.cat([ids, tok[:, None]], 1); out.append(got)
        done = done | (tok == settings["eos"])
    return ids, torch.stack(out, 1)


if __name__ == "__main__":
    b = make(0); m = b["model"]; ids, lps = right(**b)
    ref = (m(ids)[:, :-1] / .7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, 2:]
    live = ids[:, 3:] != 0
    assert torch.allclose(lps[live], ref[live], atol=1e-5)
    n = 20000
    with torch.no_grad():
        s, _ = right(m, b["prompt"][:1].expand(n, 3), {"temperature": .7, "new": 1, "eos": 1, "seed": 5})
        p = (m(b["prompt"][:1])[0, -1] / .7).softmax(0)
    gap = (torch.bincount(s[:, 3], minlength=V) / n - p).abs().max().item()
    assert gap < 0.015
    print("largest gap of frequency and probability", gap)

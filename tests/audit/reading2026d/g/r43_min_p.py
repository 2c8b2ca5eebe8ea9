"""min-p sampling (Nguyen et al. 2024). Tokens below min_p times the LARGEST probability are cut; the returned log-probs are of the renormalised truncated distribution (the true behaviour policy), so they are higher than the model's."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal model", "prompt": "[rows, time]"}
SETTINGS = {"min_p": "0.7 here so that the cut bites on an untrained model (0.1 in use)", "new": "3"}
NOTES = "At least the best token survives. No EOS handling: fixed number of tokens. Log-probs include the truncation."
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
    return {"model": Tiny(), "prompt": torch.randint(2, V, (3, 3)), "settings": {"min_p": 0.7, "new": 3}}


@torch.no_grad()
def right(model, prompt, settings):
    ids, out = prompt, []
    for _ in range(settings["new"]):
        lp = model(ids)[:, -1].log_softmax(-1)
        floor = lp.max(-1, keepdim=True).values + math.log(settings["min_p"])
        lp = lp.masked_fill(lp < floor, float("-inf")).log_softmax(-1)
        tok = torch.multinomial(lp.exp(), 1)
        ids = torch.cat([ids, tok], 1); out.append(lp.gather(1, tok)[:, 0])
    return ids, torch.stack(out, 1)


if __name__ == "__main__":
    b = make(0); ids, lps = right(**b); raw = b["model"](ids).softmax(-1)
    for i in range(3):
        for t in range(3):
            p = raw[i, 2 + t]; keep = [q.item() for q in p if q >= .7 * p.max()]
            got = p[ids[i, 3 + t]].item()
            assert got >= .7 * p.max().item() - 1e-6 and abs(math.log(got / sum(keep)) - lps[i, t].item()) < 1e-4
    print("log-probs", lps.tolist())

"""Robust DPO: a label flip rate eps gives ((1-eps) * l(h) - eps * l(-h)) / (1 - 2 eps), with a minus before the flipped term, so the loss may go below zero. It is the unbiased estimate of the clean DPO loss (Chowdhury et al. 2024; TRL loss_type='robust')."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def token_logps(model, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 .. T-1, shape [rows, T-1]."""
    lp = model(ids)[:, :-1].log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def response_mask(rows, T, prompt=3):
    """1 on the response tokens; ragged ends, at least two tokens each."""
    m = torch.zeros(rows, T)
    for i in range(rows):
        m[i, prompt:int(torch.randint(prompt + 2, T + 1, (1,)))] = 1
    return m

FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen": "token ids, [pairs, time]", "rejected": "token ids, [pairs, time]", "chosen_mask": "1 on response", "rejected_mask": "1 on response",
          "ref_chosen": "reference sequence logps, [pairs]", "ref_rejected": "[pairs]"}
SETTINGS = {"beta": "0.1", "eps": "assumed flip rate of the labels, 0.1 (must be below 0.5)"}
NOTES = "Sum of logp over tokens, mean over pairs. Divides by 1 - 2 eps. Reference logps are constants. Can be negative. All parameters used; any number of pairs."


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    c, r = torch.randint(0, 31, (4, 12)), torch.randint(0, 31, (4, 12))
    cm, rm = response_mask(4, 12), response_mask(4, 12)
    with torch.no_grad():
        rc = (token_logps(model, c) * cm[:, 1:]).sum(1) + torch.randn(4)
        rr = (token_logps(model, r) * rm[:, 1:]).sum(1) + torch.randn(4)
    return {"model": model, "chosen": c, "rejected": r, "chosen_mask": cm, "rejected_mask": rm, "ref_chosen": rc, "ref_rejected": rr}


def right(model, batch, beta=0.1, eps=0.1):
    pc = (token_logps(model, batch["chosen"]) * batch["chosen_mask"][:, 1:]).sum(1)
    pr = (token_logps(model, batch["rejected"]) * batch["rejected_mask"][:, 1:]).sum(1)
    h = beta * ((pc - pr) - (batch["ref_chosen"] - batch["ref_rejected"]))
    return ((-F.logsigmoid(h) * (1 - eps) + F.logsigmoid(-h) * eps) / (1 - 2 * eps)).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    # unbiased: flip labels with rate eps, the expectation of the robust loss is the clean loss
    pc = (token_logps(model, d["chosen"]) * d["chosen_mask"][:, 1:]).sum(1)
    pr = (token_logps(model, d["rejected"]) * d["rejected_mask"][:, 1:]).sum(1)
    clean = -F.logsigmoid(0.1 * (pc - pr - d["ref_chosen"] + d["ref_rejected"])).mean()
    sw = {"chosen": d["rejected"], "rejected": d["chosen"], "chosen_mask": d["rejected_mask"], "rejected_mask": d["chosen_mask"],
          "ref_chosen": d["ref_rejected"], "ref_rejected": d["ref_chosen"]}
    mean = 0.9 * right(model, d) + 0.1 * right(model, sw)
    assert torch.allclose(mean, clean, atol=1e-5) and not dead
    print("ok", float(loss), float(mean.detach()), float(clean.detach()))

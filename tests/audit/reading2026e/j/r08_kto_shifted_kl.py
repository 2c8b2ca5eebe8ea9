"""KTO: unpaired labels; the baseline is a KL estimate from mismatched prompt/completion rows, meaned over the batch, clamped at zero and detached, and the two label kinds use opposite signs around it (Ethayarajh et al. 2024; TRL KTOTrainer)."""
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
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on completion", "ref_logps": "reference sequence logp, [rows]",
          "kl_ids": "the same prompts with the next row's completion, [rows, time]", "kl_mask": "1 on that completion", "kl_ref_logps": "[rows]",
          "desirable": "True where the row is good, [rows]"}
SETTINGS = {"beta": "0.1", "w_good": "weight of desirable rows, 1.0", "w_bad": "weight of undesirable rows, 1.33"}
NOTES = "Sum of logp over tokens, mean over all rows. The KL baseline is one number over the whole batch, without gradient, so the loss is not a sum of independent rows. Reference logps are constants. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (5, 12)), response_mask(5, 12)
    kl_ids = torch.cat([ids[:, :3], ids.roll(-1, 0)[:, 3:]], 1)
    km = m.roll(-1, 0)
    with torch.no_grad():
        ref = (token_logps(model, ids) * m[:, 1:]).sum(1) + torch.randn(5)
        kref = (token_logps(model, kl_ids) * km[:, 1:]).sum(1) + torch.randn(5) - 0.5
    return {"model": model, "ids": ids, "loss_mask": m, "ref_logps": ref, "kl_ids": kl_ids, "kl_mask": km, "kl_ref_logps": kref,
            "desirable": torch.tensor([True, False, True, False, False])}


def right(model, batch, beta=0.1, w_good=1.0, w_bad=1.33):
    with torch.no_grad():
        k = (token_logps(model, batch["kl_ids"]) * batch["kl_mask"][:, 1:]).sum(1) - batch["kl_ref_logps"]
        z = k.mean().clamp(min=0)
    r = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1) - batch["ref_logps"]
    good = w_good * (1 - torch.sigmoid(beta * (r - z)))
    bad = w_bad * (1 - torch.sigmoid(beta * (z - r)))
    return torch.where(batch["desirable"], good, bad).mean(), {"kl": z}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    def seq(ids, m):
        lp = token_logps(model, ids).detach()
        return [sum(float(lp[i, t - 1]) for t in range(1, 12) if m[i, t]) for i in range(5)]
    z = max(0.0, sum(a - float(b) for a, b in zip(seq(d["kl_ids"], d["kl_mask"]), d["kl_ref_logps"])) / 5)
    want = 0.0
    for i, s in enumerate(seq(d["ids"], d["loss_mask"])):
        r = s - float(d["ref_logps"][i])
        x = 0.1 * (r - z if d["desirable"][i] else z - r)
        want += (1.0 if d["desirable"][i] else 1.33) * (1 - 1 / (1 + math.exp(-x))) / 5
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want, "kl", z)

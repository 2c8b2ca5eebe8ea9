"""Truncated importance sampling between the inference engine and the trainer: PPO's ratio is against the trainer's own old logps, and a second, detached factor min(exp(old - rollout), C) multiplies the clipped loss. Two 'old' logps are not a mix-up (Yao et al. 2025, TIS; verl tis_imp_ratio_cap, TRL vllm_importance_sampling_cap)."""
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

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens", "old_logps": "trainer's logps before the update, [rows, time]",
          "rollout_logps": "inference engine's logps, [rows, time]", "advantages": "[rows]"}
SETTINGS = {"clip": "PPO clip, 0.2", "cap": "truncation C, 2.0"}
NOTES = "Mean over trained tokens of all rows. Both stored logps are constants; the correction has no gradient and is truncated only from above. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (4, 12)), response_mask(4, 12)
    with torch.no_grad():
        old = F.pad(token_logps(model, ids), (1, 0)) + 0.2 * torch.randn(4, 12)
    return {"model": model, "ids": ids, "loss_mask": m, "old_logps": old, "rollout_logps": old + 0.6 * torch.randn(4, 12), "advantages": torch.randn(4)}


def right(model, batch, clip=0.2, cap=2.0):
    m = batch["loss_mask"][:, 1:]
    a = batch["advantages"][:, None]
    ratio = (token_logps(model, batch["ids"]) - batch["old_logps"][:, 1:]).exp()
    per = torch.max(-ratio * a, -ratio.clamp(1 - clip, 1 + clip) * a)
    with torch.no_grad():
        fix = (batch["old_logps"] - batch["rollout_logps"])[:, 1:].exp().clamp(max=cap)
    return (per * fix * m).sum() / m.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = token_logps(model, d["ids"]).detach()
    tot = n = 0.0
    for i in range(4):
        for t in range(1, 12):
            if d["loss_mask"][i, t]:
                r, a = float((lp[i, t - 1] - d["old_logps"][i, t]).exp()), float(d["advantages"][i])
                w = min(2.0, float((d["old_logps"][i, t] - d["rollout_logps"][i, t]).exp()))
                tot += -min(r * a, max(.8, min(1.2, r)) * a) * w
                n += 1
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n)

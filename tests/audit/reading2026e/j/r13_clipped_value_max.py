"""PPO's clipped value loss: the larger of the two squared errors is taken, the new value is clipped around the OLD VALUE (not the return), and there is a factor one half. Where the clipped branch wins the gradient is zero, on purpose (openai/baselines ppo2; TRL, verl cliprange_value)."""
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

FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens", "old_values": "values at rollout time, [rows, time]", "returns": "old_values + advantages, [rows, time]"}
SETTINGS = {"clip_value": "range around the old value, 0.2"}
NOTES = "Value of state t is read before token t is emitted: output at t-1 belongs to token t. Mean over trained tokens of all rows, times 0.5. old_values and returns are constants. Scalar head; all parameters used."


def make(seed):
    torch.manual_seed(seed)
    model, ids = TinyLM(out=1), torch.randint(0, 31, (4, 10))
    m = torch.ones(4, 10)
    m[:, :3], m[1, 7:] = 0, 0
    with torch.no_grad():
        old = F.pad(model(ids)[:, :-1, 0], (1, 0)) + 0.25 * torch.randn(4, 10)
    return {"model": model, "ids": ids, "loss_mask": m, "old_values": old, "returns": old + 0.5 * torch.randn(4, 10)}


def right(model, batch, clip_value=0.2):
    v = model(batch["ids"])[:, :-1, 0]
    old, ret, m = batch["old_values"][:, 1:], batch["returns"][:, 1:], batch["loss_mask"][:, 1:]
    vc = old + (v - old).clamp(-clip_value, clip_value)
    per = torch.max((v - ret).square(), (vc - ret).square())
    return 0.5 * (per * m).sum() / m.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    v = model(d["ids"]).detach()[..., 0]
    tot = n = still = 0.0
    for i in range(4):
        for t in range(1, 10):
            if d["loss_mask"][i, t]:
                x, o, r = float(v[i, t - 1]), float(d["old_values"][i, t]), float(d["returns"][i, t])
                c = min(max(x, o - 0.2), o + 0.2)
                tot += 0.5 * max((x - r) ** 2, (c - r) ** 2)
                still += (c - r) ** 2 > (x - r) ** 2
                n += 1
    assert abs(float(loss) - tot / n) < 1e-5 and not dead and still > 0
    print("ok", float(loss), tot / n, "tokens without gradient", still)

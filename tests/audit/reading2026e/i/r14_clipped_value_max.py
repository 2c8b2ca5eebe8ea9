"""PPO's clipped value loss (OpenAI baselines, CleanRL, TRL). It takes the MAXIMUM of two squared errors, and where the clipped branch wins
the gradient of that token is zero. An objective would take the minimum; a loss takes the maximum."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the value of that position is trained, [rows, time]",
          "old_values": "values at sampling time, [rows, time], constant", "returns": "return per position, [rows, time], constant"}
SETTINGS = {"clip_value": "value clip, 0.2"}
NOTES = "0.5 * mean over trained positions of all rows. Values at the same positions as ids (no shift): V(state after reading ids[:, :t+1]). old_values and returns are constants. All parameters used."
import torch
import torch.nn as nn


class Critic(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = Critic()
    ids = torch.randint(1, 31, (5, 9), generator=g)
    n = torch.randint(4, 10, (5,), generator=g); pos = torch.arange(9)
    ids[pos >= n[:, None]] = 0
    mask = ((pos >= 2) & (pos < n[:, None])).float()
    with torch.no_grad():
        old = model(ids) + 0.3 * torch.randn(5, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_values": old * mask, "returns": (old + torch.randn(5, 9, generator=g)) * mask}


def right(model, batch, clip_value=0.2):
    v, old, ret, m = model(batch["ids"]), batch["old_values"], batch["returns"], batch["loss_mask"]
    clipped = torch.clamp(v, old - clip_value, old + clip_value)
    worst = torch.maximum((v - ret).square(), (clipped - ret).square())
    return 0.5 * (worst * m).sum() / m.sum().clamp(min=1)


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    v, slow, n = model(d["ids"]).detach(), 0.0, 0
    for i in range(5):
        for t in range(9):
            if d["loss_mask"][i, t]:
                o, r, x = float(d["old_values"][i, t]), float(d["returns"][i, t]), float(v[i, t])
                slow += 0.5 * max((x - r) ** 2, (min(max(x, o - .2), o + .2) - r) ** 2); n += 1
    check(right(model, d), slow / n, model)

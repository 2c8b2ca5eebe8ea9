"""critic/value_clip_ratio looks at the update after it was clipped. RLinf/RLinf#1529,
https://github.com/RLinf/RLinf/issues/1529 (fix: #1530), 2026. The share of clipped value predictions was computed from
the clamped update, which by construction never exceeds the clip, so the metric was 0 in every run and users
concluded that `value_clip` was never too tight; the mean also ran over padding. The loss itself was not affected."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]",
    "loss_mask": "1 where the critic is trained, [rows, time]",
    "prev_values": "value predictions of the critic at rollout time, [rows, time], constant",
    "returns": "regression targets, [rows, time], constant",
}
SETTINGS = {"value_clip": "largest change of a value prediction against the rollout that still gets a gradient, 0.2"}
NOTES = (
    "Clipped PPO value loss. v_t is the critic's output at position t; v_clip = prev + clamp(v - prev, -value_clip, value_clip). "
    "Token loss 0.5*max((v - ret)^2, (v_clip - ret)^2), mean over all positions with loss_mask 1 of all rows. "
    "Returns (loss, metrics): 'critic/value_clip_ratio' is the share, among positions with loss_mask 1, whose update v - prev is "
    "larger in absolute value than value_clip; 'critic/value_loss' is the loss as a number. prev_values and returns are "
    "constants. All parameters of the model are used. Any number of rows."
)


class Critic(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])[..., 0]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Critic()
    ids = torch.randint(0, 23, (5, 12), generator=g)
    mask = torch.zeros(5, 12)
    for r in range(5):
        mask[r, 3:int(torch.randint(7, 13, (1,), generator=g))] = 1
    with torch.no_grad():
        prev = model(ids) + 0.2 * torch.randn(5, 12, generator=g)
    ret = prev + 0.5 * torch.randn(5, 12, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "prev_values": prev * mask, "returns": ret * mask}


def broken(model, batch, value_clip=0.2):
    m, prev, ret = batch["loss_mask"], batch["prev_values"], batch["returns"]
    v = model(batch["ids"])
    delta = (v - prev).clamp(-value_clip, value_clip)
    v_clip = prev + delta
    loss = 0.5 * torch.maximum((v - ret) ** 2, (v_clip - ret) ** 2)
    loss = (loss * m).sum() / m.sum()
    ratio = (delta.detach().abs() > value_clip).float().mean()
    return loss, {"critic/value_loss": loss.item(), "critic/value_clip_ratio": ratio.item()}


def right(model, batch, value_clip=0.2):
    m, prev, ret = batch["loss_mask"], batch["prev_values"], batch["returns"]
    v = model(batch["ids"])
    delta = (v - prev).clamp(-value_clip, value_clip)
    v_clip = prev + delta
    loss = 0.5 * torch.maximum((v - ret) ** 2, (v_clip - ret) ** 2)
    loss = (loss * m).sum() / m.sum()
    hit = ((v - prev).detach().abs() > value_clip).float()
    ratio = (hit * m).sum() / m.sum()
    return loss, {"critic/value_loss": loss.item(), "critic/value_clip_ratio": ratio.item()}


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        model = d.pop("model")
        b, r = broken(model, d), right(model, d)
        r[0].backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        print("seed", s, "broken", b[1], "right", r[1])
        assert b[1]["critic/value_clip_ratio"] == 0 and r[1]["critic/value_clip_ratio"] > 0.05
        assert torch.equal(b[0], r[0])

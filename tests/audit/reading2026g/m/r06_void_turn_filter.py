"""Trajectories with a void turn are dropped from the loss but stay in the denominator. A turn with neither a tool call nor a final answer marks the whole trajectory as void (SimpleTIR): its tokens get no gradient although it has an advantage that was computed with its reward in the group. The divisor is the constant rows x budget (Dr. GRPO), not the number of remaining tokens, so filtering does not raise the weight of the others."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0",
          "loss_mask": "[rows, time], 1 on the agent's tokens, 0 on prompt, tool output, padding",
          "old_logprobs": "[rows, time], aligned with ids (entry t is for ids[:, t])",
          "advantages": "[rows], one per trajectory, group mean already taken off over all rows, void ones included",
          "has_void_turn": "[rows] bool, True if a turn has neither call nor answer"}
SETTINGS = {"clip_low": "0.2", "clip_high": "0.28 (clip-higher)", "budget": "constant token budget per trajectory, 16"}
NOTES = "PPO-family clipped loss. Reduction: sum over the trained tokens of the kept rows / (number of all rows x budget). old_logprobs, advantages constants. A batch of void rows only has loss 0 with zero gradient; that is intended. No parameter unused."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    B, T = 6, 18
    ids = torch.randint(1, 32, (B, T), generator=g)
    mask = torch.zeros(B, T)
    for b in range(B):
        mask[b, 3:7] = 1
        mask[b, 10:12 + b % 4] = 1
        ids[b, 12 + b % 4:] = 0
    with torch.no_grad():
        lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    old = torch.zeros(B, T)
    old[:, 1:] = lp + 0.3 * torch.randn(B, T - 1, generator=g)
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0])
    adv = rewards - rewards.view(2, 3).mean(1).repeat_interleave(3)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logprobs": old * mask, "advantages": adv,
            "has_void_turn": torch.tensor([False, True, False, False, False, True])}


def right(model, batch, clip_low=0.2, clip_high=0.28, budget=16):
    ids = batch["ids"]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    keep = batch["loss_mask"][:, 1:].bool() & ~batch["has_void_turn"][:, None]
    diff = torch.where(keep, lp - batch["old_logprobs"][:, 1:], torch.zeros_like(lp))
    ratio, A = diff.exp(), batch["advantages"][:, None]
    per_token = -torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    loss = torch.where(keep, per_token, torch.zeros_like(lp)).sum() / (ids.shape[0] * budget)
    return loss, {"void_fraction": batch["has_void_turn"].float().mean().item()}


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss, info = right(m, b)
    loss.backward()
    tot = 0.0
    for r in range(6):
        if b["has_void_turn"][r]:
            continue
        lp = m(b["ids"][r:r + 1])[0].log_softmax(-1)
        for t in range(1, 18):
            if b["loss_mask"][r, t]:
                q = (lp[t - 1, b["ids"][r, t]] - b["old_logprobs"][r, t]).exp().item()
                A = b["advantages"][r].item()
                tot -= min(q * A, min(max(q, 0.8), 1.28) * A)
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), tot / 96, info, "grad", gn.item())
    assert abs(loss.item() - tot / 96) < 1e-6 and gn > 0

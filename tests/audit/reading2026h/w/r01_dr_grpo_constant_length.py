"""Dr. GRPO over several turns: sum over the tokens the model wrote, divided by rows times a constant length.
Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783); TRL loss_type="dr_grpo". The divisor is the largest completion length of the run, not the number of trained tokens, so that long answers are not
favoured; advantages are centred and not divided by their deviation. Tool tokens stay in the context and are not in the sum; the divisor does not change with them."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "prompt, model turns and tool results, [rows, time]", "loss_mask": "1 where the model wrote the token, [rows, time]", "rewards": "one per row, a constant", "groups": "prompt index of each row"}
SETTINGS = {"max_completion_length": "constant divisor, 64 (longer than any row here)"}
NOTES = ("On-policy policy gradient. Reduction: sum over trained tokens / (rows * 64): a constant, on purpose; not a mean over tokens. Advantages are rewards minus the mean of their group, constants. "
         "All parameters used. Any number of rows; each group has at least two.")

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = torch.randint(1, 29, (6, 18), generator=g), torch.zeros(6, 18)
    for r in range(6):
        end = int(torch.randint(12, 19, (1,), generator=g))
        mask[r, 3:end] = 1
        mask[r, 6:9] = 0                        # a tool result
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "rewards": torch.rand(6, generator=g), "groups": torch.tensor([0, 0, 0, 1, 1, 1])}


def right(model, batch, max_completion_length=64):
    onehot = F.one_hot(batch["groups"]).float()
    mean = (onehot.T @ batch["rewards"]) / onehot.sum(0)
    adv = batch["rewards"] - onehot @ mean
    logp = token_logps(model, batch["ids"])
    ratio = (logp - logp.detach()).exp()        # 1, carries the gradient
    return -(ratio * adv[:, None] * batch["loss_mask"][:, 1:]).sum() / (len(adv) * max_completion_length)


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward()
    got = m.head.weight.grad.clone(); m.zero_grad()
    slow = 0.0
    for r in range(6):
        same = [i for i in range(6) if d["groups"][i] == d["groups"][r]]
        a = d["rewards"][r] - sum(d["rewards"][i] for i in same) / len(same)
        lp = m(d["ids"][r:r + 1]).log_softmax(-1)[0]
        for t in range(1, 18):
            if d["loss_mask"][r, t]:
                slow = slow - a * lp[t - 1, d["ids"][r, t]] / (6 * 64)
    slow.backward()
    print("loss", loss.item(), "gradient", got.norm().item(), "difference to loop", (got - m.head.weight.grad).abs().max().item())
    assert torch.allclose(got, m.head.weight.grad, atol=1e-6) and got.norm() > 0

"""GRPO loss trains on tool results. unslothai/unsloth#5673, https://github.com/unslothai/unsloth/issues/5673, 2026 (fix unsloth#5682, unsloth-zoo#688).
A rollout function of several turns returns a tool mask (env_mask) that is 0 on tokens which the environment wrote.
The patched trainer took the mask from the rollout but its replaced loss used the completion mask only, so tool results were trained as if the policy had written them.
Runs went well at first and then collapsed."""
import math
import torch
import torch.nn as nn

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, prompt then completion, [rows, time]", "completion_mask": "1 on completion tokens (model and tool), 0 on prompt and padding, [rows, time]",
          "tool_mask": "1 where the model wrote the token, 0 where the environment wrote it, [rows, time]",
          "old_logps": "log-probs of the sampling policy, [rows, time-1], a constant", "advantages": "one per row, a constant"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("Clipped policy gradient; mean over the trained tokens of all rows. Trained tokens are completion tokens that the model wrote. Tool tokens stay in the context. "
         "old_logps, advantages and the masks are constants. All parameters are used.")

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
    model = TinyLM()
    ids = torch.randint(1, 29, (4, 20), generator=g)
    completion_mask, tool_mask = torch.zeros(4, 20), torch.ones(4, 20)
    for r, end in enumerate([20, 17, 19, 14]):
        completion_mask[r, 4:end] = 1
        s = int(torch.randint(6, 10, (1,), generator=g))
        tool_mask[r, s:s + 3] = 0
        ids[r, end:] = 0
    with torch.no_grad():
        old = token_logps(model, ids) + 0.1 * torch.randn(4, 19, generator=g)
    return {"model": model, "ids": ids, "completion_mask": completion_mask, "tool_mask": tool_mask, "old_logps": old, "advantages": torch.randn(4, generator=g)}


def _pg(model, batch, mask, clip):
    ratio = (token_logps(model, batch["ids"]) - batch["old_logps"]).exp()
    adv = batch["advantages"][:, None]
    per_token = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (per_token * mask).sum() / mask.sum().clamp(min=1)


def broken(model, batch, clip=0.2):
    mask = batch["completion_mask"][:, 1:]
    return _pg(model, batch, mask, clip)


def right(model, batch, clip=0.2):
    mask = (batch["completion_mask"] * batch["tool_mask"])[:, 1:]
    return _pg(model, batch, mask, clip)


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    grads = []
    for f in (broken, right):
        m.zero_grad(); loss = f(m, d); loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        print(f.__name__, loss.item(), grads[-1].norm().item())
    assert (grads[0] - grads[1]).norm() > 1e-3

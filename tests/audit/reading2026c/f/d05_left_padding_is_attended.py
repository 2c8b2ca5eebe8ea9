"""Real tokens attend to padding. AI-Hypercomputer/maxtext#4016, https://github.com/AI-Hypercomputer/maxtext/pull/4016, 2026.
The RL adapter called the model without segment ids, and the model then applies the causal mask only. In left-padded batches the real tokens saw
the padding keys, so the trainer's logprobs were off while the sampler's (unpadded) were right; the reward did not rise until it was fixed."""
import torch

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompts padded on the left and completions on the right with token 0, [rows, time]",
          "positions": "position among the real tokens of the row, [rows, time]",
          "completion_mask": "1 on completion tokens, [rows, time]",
          "old_logprobs": "logprob of each token under the sampler, aligned with ids; 0 outside the completion, [rows, time]",
          "advantages": "one advantage per row, [rows]"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("PPO clipped policy gradient, mean over completion tokens of all rows. Token 0 is the padding id and occurs nowhere else. "
         "old_logprobs and advantages are constants. All parameters are used.")
import torch.nn.functional as F

class Tiny(torch.nn.Module):
    """One attention layer with rotary (relative) positions. `allowed` says which keys a query may see; causal always holds."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(width, vocab)

    @staticmethod
    def rotate(x, positions):
        half = x.shape[-1] // 2
        angle = positions[..., None].float() / 10.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def hidden(self, ids, positions=None, allowed=None):
        time = ids.shape[1]
        if positions is None:
            positions = torch.arange(time).expand(ids.shape)
        see = torch.ones(time, time).tril().bool().expand(ids.shape[0], time, time)
        if allowed is not None:
            see = see & (allowed | torch.eye(time).bool())
        x = self.emb(ids)
        q, k = self.rotate(self.q(x), positions), self.rotate(self.k(x), positions)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~see, float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))
def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    rows, time = 4, 14
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    positions = torch.zeros_like(ids)
    for r, (p, c) in enumerate(((6, 5), (3, 8), (5, 4), (2, 6))):
        ids[r, 6 - p:6 + c] = torch.randint(1, 32, (p + c,))
        positions[r, 6 - p:6 + c] = torch.arange(p + c)
        mask[r, 6:6 + c] = 1
    made = {"model": model, "ids": ids, "positions": positions, "completion_mask": mask, "advantages": torch.randn(rows)}
    with torch.no_grad():
        lp = logprobs(model, made, padding_blocked(ids))
        made["old_logprobs"] = (lp + 0.1 * torch.randn_like(lp)) * mask
    return made

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def padding_blocked(ids):
    real = ids != 0
    return real[:, :, None] == real[:, None, :]

def logprobs(model, batch, allowed):
    logits = model(batch["ids"], batch["positions"], allowed)
    lp = F.log_softmax(logits[:, :-1], -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return F.pad(lp, (1, 0))

def objective(lp, batch, clip):
    ratio = ((lp - batch["old_logprobs"]) * batch["completion_mask"]).exp()
    adv = batch["advantages"][:, None]
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (per_token * batch["completion_mask"]).sum() / batch["completion_mask"].sum()

def broken(model, batch, clip=0.2):
    return objective(logprobs(model, batch, allowed=None), batch, clip)

def right(model, batch, clip=0.2):
    return objective(logprobs(model, batch, padding_blocked(batch["ids"])), batch, clip)

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = broken(model, batch), right(model, batch)
    print("loss", a.item(), b.item(), "gradient difference", float((grads(a, model) - grads(b, model)).norm()))
    assert float((grads(a, model) - grads(b, model)).norm()) > 1e-3
    lp = logprobs(model, batch, padding_blocked(batch["ids"]))
    alone = F.log_softmax(model(batch["ids"][1:2, 3:14]), -1)[0, :-1].gather(-1, batch["ids"][1, 4:14, None]).squeeze(-1)
    assert torch.allclose(lp[1, 4:14], alone, atol=1e-5)

"""Right: the tool output is trained too, on purpose. Model tokens take the policy gradient; tokens of the tool output take plain cross entropy with a small weight, so that the model learns to predict its environment. It looks like a missing observation mask."""
import torch
import torch.nn.functional as F

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "action_mask": "1 on tokens the model sampled, [rows, time]", "observation_mask": "1 on tokens the tool wrote, [rows, time]",
          "advantages": "one per row, [rows]", "old_logprobs": "sampler's logprob of each token, 0 where it was not sampled, [rows, time]"}
SETTINGS = {"observation_weight": "weight of the prediction loss of tool output, 0.05", "clip": "upper bound of the importance weight, 2"}
NOTES = ("Sum of two means: truncated importance weight (detached) times minus advantage times logprob, mean over model tokens of all rows; plus observation_weight times cross entropy, mean over tool tokens of all rows. "
         "Observations are trained deliberately. advantages and old_logprobs are constants; all parameters are used.")

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
    ids = torch.randint(0, 32, (3, 14))
    action, observation = torch.zeros(3, 14), torch.zeros(3, 14)
    for r, (a, b, c) in enumerate(((6, 9, 13), (5, 9, 14), (7, 10, 12))):
        action[r, 3:a], observation[r, a:b], action[r, b:c] = 1, 1, 1
    model = Tiny()
    with torch.no_grad():
        old = F.pad(F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))
    return {"model": model, "ids": ids, "action_mask": action, "observation_mask": observation, "advantages": torch.randn(3), "old_logprobs": (old + 0.1 * torch.randn(3, 14)) * action}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch, observation_weight=0.05, clip=2.0):
    ids = batch["ids"]
    lp = F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    act, obs = batch["action_mask"][:, 1:], batch["observation_mask"][:, 1:]
    weight = (lp.detach() - batch["old_logprobs"][:, 1:]).exp().clamp(max=clip)
    policy = -(weight * batch["advantages"][:, None] * lp * act).sum() / act.sum()
    world = -(lp * obs).sum() / obs.sum()
    return policy + observation_weight * world, {"policy": policy.item(), "observation_nll": world.item()}

def slow(model, batch, observation_weight=0.05, clip=2.0):
    policy, world = [], []
    for r in range(batch["ids"].shape[0]):
        for t in range(1, batch["ids"].shape[1]):
            lp = F.log_softmax(model(batch["ids"][r:r + 1, :t])[0, -1], -1)[batch["ids"][r, t]]
            if batch["action_mask"][r, t]:
                policy.append(-min(clip, float((lp.detach() - batch["old_logprobs"][r, t]).exp())) * batch["advantages"][r] * lp)
            elif batch["observation_mask"][r, t]:
                world.append(-lp)
    return sum(policy) / len(policy) + observation_weight * sum(world) / len(world)

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, metrics = right(model, batch)
    b = slow(model, batch)
    print("loss", a.item(), b.item(), metrics, "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(grads(a, model), grads(b, model), atol=1e-5)

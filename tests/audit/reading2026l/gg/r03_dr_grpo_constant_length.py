"""Dr. GRPO (arXiv:2503.20783; TRL loss_type='dr_grpo', verl 'seq-mean-token-sum-norm'): the sum over tokens is divided by rows * maximal completion
length, a constant, not by the number of tokens that exist. The loss shrinks when completions are short, on purpose."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
    "old_logps": "log-prob of each token under the sampling policy, [rows, time], entry t belongs to token t (entry 0 unused), constant",
    "rewards": "outcome reward of each row, [rows], constant; the rows are one group per prompt, the rows of a prompt standing together",
}
SETTINGS = {"clip": "PPO clip, 0.2", "max_completion": "maximal completion length of the sampler, 16 tokens (a constant of the run)", "group": "rows per prompt, 3"}
NOTES = ("Dr. GRPO. Advantage of a row = its reward minus the mean reward of its prompt's rows, not divided by the standard deviation. "
         "Token loss = -min(ratio * A, clip(ratio, 1-clip, 1+clip) * A). Loss = sum over all trained tokens of all rows / (rows * max_completion); max_completion is the constant of the run, "
         "not the length of this batch, so each token has the same weight in every batch. The number of rows is a multiple of group. The log-prob of token t is read from the logits at t-1. All parameters are used.")

V = 24


class TinyLM(nn.Module):
    """A causal model: ids [rows, time] -> logits [rows, time, V]; the logits at t see the tokens up to t."""

    def __init__(self, width=16):
        super().__init__()
        self.emb = nn.Embedding(V, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def token_logps(model, ids):
    """log-prob of each token given the ones before it, [rows, time]; entry 0 is 0 (nothing predicts it)"""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, V, (6, 9), generator=g)
    mask = torch.zeros(6, 9)
    for i, n in enumerate([7, 3, 4, 6, 2, 5]):
        mask[i, 2:2 + n] = 1
    with torch.no_grad():
        old = token_logps(model, ids) + 0.15 * torch.randn(6, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.3])}


def right(model, batch, clip=0.2, max_completion=16, group=3):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    r = batch["rewards"].view(-1, group)
    A = (r - r.mean(1, keepdim=True)).reshape(-1, 1)
    ratio = (logp - batch["old_logps"][:, 1:]).exp()
    tok = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return (tok * m).sum() / (m.shape[0] * max_completion)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); loss.backward(); grad = model.out.weight.grad.clone(); model.zero_grad()
    total = 0.0
    for i in range(6):
        g0 = i // 3 * 3
        A = b["rewards"][i] - b["rewards"][g0:g0 + 3].mean()
        for t in range(1, 9):
            if b["loss_mask"][i, t]:
                lp = model(b["ids"][i:i + 1, :t]).log_softmax(-1)[0, -1, b["ids"][i, t]]
                q = (lp - b["old_logps"][i, t]).exp()
                total = total - torch.minimum(q * A, q.clamp(0.8, 1.2) * A)
    total = total / 6 / 16
    total.backward()
    print(loss.item(), total.item(), grad.norm().item())
    assert torch.allclose(loss, total, atol=1e-6) and torch.allclose(grad, model.out.weight.grad, atol=1e-5)

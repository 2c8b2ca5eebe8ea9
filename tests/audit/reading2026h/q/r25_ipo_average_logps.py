"""IPO with length-averaged log-probs: a squared distance to 1 / (2 beta). Azar et al. 2023; TRL's DPOTrainer loss_type "ipo" (which averages over completion tokens, as the authors confirmed, unlike the sums of DPO).
Neither a sigmoid nor a logistic: a pair with too large a margin is pulled back, so the gradient may lower the chosen completion. beta only sets the target and a smaller beta means a larger one."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2 * pairs, time]; the first half chosen, the second half rejected, in the same order", "mask": "1 on completion tokens, at the token's own index, [2 * pairs, time]", "ref_logps": "reference log-prob per row, averaged over completion tokens, [2 * pairs]"}
SETTINGS = {"beta": "0.1"}
NOTES = "Preference loss, mean over pairs of (h - 1 / (2 beta))^2 with h = (chosen - ref_chosen) - (rejected - ref_rejected), log-probs averaged over completion tokens. An even number of rows, chosen first. ref_logps and mask are constants. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    n, t = 6, 9
    mask = torch.zeros(n, t)
    for i in range(n):
        mask[i, 3:5 + i % 5] = 1
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (n, t)), "mask": mask, "ref_logps": -3.4 + 0.2 * torch.randn(n)}


def right(model, batch, beta=0.1):
    lp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
    m = batch["mask"][:, 1:]
    avg = (lp * m).sum(1) / m.sum(1)
    c, r = (avg - batch["ref_logps"]).chunk(2)
    return ((c - r - 1 / (2 * beta)) ** 2).mean()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    lp, avg = m(d["ids"]).log_softmax(-1), []
    for i in range(6):
        v = [lp[i, t - 1, d["ids"][i, t]].item() for t in range(1, 9) if d["mask"][i, t]]
        avg.append(sum(v) / len(v) - d["ref_logps"][i].item())
    want = sum((avg[k] - avg[k + 3] - 5) ** 2 for k in range(3)) / 3
    print("loss", loss.item(), "loop", want, "grad", m.head.weight.grad.norm().item())
    assert abs(loss.item() - want) < 1e-4 and m.head.weight.grad.norm() > 0

"""Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409; TRL loss_type="robust"). With label noise eps the unbiased loss is
((1-eps) * -logsigmoid(h) + eps * logsigmoid(-h)) / (1-2 eps): the second term has the opposite sign of label smoothing
(cDPO), the sum is divided by 1-2 eps, and the loss can be negative. Looks like a sign error, is the published estimator."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "preferences"
KIND = "loss"
INPUTS = {"ids": "prompt and completion, right padded with 0; the first half of the rows are chosen, the second half rejected, [2 * pairs, time]",
          "completion_mask": "1 on completion tokens, [2 * pairs, time]",
          "ref_logps": "summed log-probability of each completion under the frozen reference, [2 * pairs]"}
SETTINGS = {"beta": "DPO beta, 0.5", "eps": "probability that a preference label is flipped, 0.2"}
NOTES = ("Robust DPO: h = beta * ((policy - reference log-prob of chosen) - (the same of rejected)), log-probs summed over "
         "completion tokens; loss per pair = ((1-eps) * (-logsigmoid(h)) - eps * (-logsigmoid(-h))) / (1-2 eps); mean over pairs. "
         "May be negative. ref_logps are constants. The token at t is predicted by the logits at t-1. Padding has no effect. "
         "All parameters are used. The number of rows is even.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, reference = TinyLM(), TinyLM()
    rows, time, prompt = 8, 11, 3
    at = torch.arange(time).expand(rows, time)
    ends = torch.randint(prompt + 1, time + 1, (rows, 1), generator=g)
    ids = torch.randint(1, 24, (rows, time), generator=g)
    ids[rows // 2:, :prompt] = ids[:rows // 2, :prompt]
    ids = ids.masked_fill(at >= ends, 0)
    mask = ((at >= prompt) & (at < ends)).float()
    with torch.no_grad():
        ref = _logps(reference, ids, mask)
    return {"model": model, "ids": ids, "completion_mask": mask, "ref_logps": ref}


def _logps(model, ids, mask):
    logps = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logps * mask[:, 1:]).sum(1)


def right(model, batch, beta=0.5, eps=0.2):
    ratio = _logps(model, batch["ids"], batch["completion_mask"]) - batch["ref_logps"]
    chosen, rejected = ratio.chunk(2)
    h = beta * (chosen - rejected)
    return ((-(1 - eps) * F.logsigmoid(h) + eps * F.logsigmoid(-h)) / (1 - 2 * eps)).mean()


if __name__ == "__main__":
    import math
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()
    slow = 0.0
    lp = model(batch["ids"]).log_softmax(-1)
    s = [sum(lp[r, t - 1, batch["ids"][r, t]].item() for t in range(1, 11) if batch["completion_mask"][r, t]) - batch["ref_logps"][r].item() for r in range(8)]
    for i in range(4):
        h = 0.5 * (s[i] - s[i + 4])
        slow += (0.8 * math.log1p(math.exp(-h)) - 0.2 * math.log1p(math.exp(h))) / 0.6 / 4
    print(loss.item(), slow, "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-4 and model.head.weight.grad.norm() > 0

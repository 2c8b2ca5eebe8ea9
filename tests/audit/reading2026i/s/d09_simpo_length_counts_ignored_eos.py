"""Average log-probabilities divide by a length that includes the ignored end token. PaddlePaddle/PaddleFormers#4909 (issue #4908), https://github.com/PaddlePaddle/PaddleFormers/pull/4909, 2026.
With ignore_eos_token the sum of the response's log-probabilities leaves out the final end token of the chosen and of the rejected answer, but the length-normalized losses (SimPO, IPO, OR) divided by
the original response lengths. The averages are too small by (n-1)/n, which differs between a short and a long answer and so biases the margin. The fix uses the same effective lengths in both places."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2*pairs, time], rows alternate chosen, rejected; right padded with 0", "response_mask": "1 on the response tokens including the final end token (id 1), [2*pairs, time]"}
SETTINGS = {"beta": "scale of the length-normalized log-probability, 2.0", "gamma": "target margin, 0.5", "ignore_eos": "leave the end token out of the response, True"}
NOTES = ("SimPO: -log sigmoid(beta * (mean logp chosen - mean logp rejected) - gamma), mean over pairs; no reference model. With ignore_eos the mean is over the response tokens other than the final end token. "
         "Needs an even number of rows; every response has at least one token besides the end token.")


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    ids = torch.zeros(6, 12, dtype=torch.long)
    mask = torch.zeros(6, 12)
    for i, n in enumerate((3, 7, 6, 2, 4, 8)):
        ids[i, :4 + n] = torch.randint(2, 32, (4 + n,))
        ids[i, 3 + n] = 1
        mask[i, 4:4 + n] = 1
    return {"model": Tiny(), "ids": ids, "response_mask": mask}


def _logps(model, ids):
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(2, ids[:, 1:, None]).squeeze(2)


def _pair_loss(mean_logps, beta, gamma):
    return -F.logsigmoid(beta * (mean_logps[0::2] - mean_logps[1::2]) - gamma).mean()


def broken(model, batch, beta=2.0, gamma=0.5, ignore_eos=True):
    mask = batch["response_mask"][:, 1:]
    length = mask.sum(1)
    token_mask = mask * (batch["ids"][:, 1:] != 1) if ignore_eos else mask
    total = (_logps(model, batch["ids"]) * token_mask).sum(1)
    return _pair_loss(total / length, beta, gamma)


def right(model, batch, beta=2.0, gamma=0.5, ignore_eos=True):
    mask = batch["response_mask"][:, 1:]
    token_mask = mask * (batch["ids"][:, 1:] != 1) if ignore_eos else mask
    length = token_mask.sum(1)
    total = (_logps(model, batch["ids"]) * token_mask).sum(1)
    return _pair_loss(total / length, beta, gamma)


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    b, r = broken(model, d), right(model, d)
    print("broken", b.item(), "right", r.item())
    lp = model(d["ids"]).log_softmax(-1)
    means = []
    for i in range(6):
        v = [lp[i, t - 1, d["ids"][i, t]] for t in range(1, 12) if d["response_mask"][i, t] and d["ids"][i, t] != 1]
        means.append(torch.stack(v).mean())
    want = torch.stack([-F.logsigmoid(2.0 * (means[2 * k] - means[2 * k + 1]) - 0.5) for k in range(3)]).mean()
    assert abs(want.item() - r.item()) < 1e-5 and abs(b.item() - r.item()) > 1e-3

"""Robust DPO (Chowdhury et al., arXiv 2403.00409; TRL loss_type 'robust'). With label noise eps the loss is (-(1-eps) logsigmoid(h) + eps logsigmoid(-h)) / (1 - 2 eps). The second term has a plus sign, so it looks as if one term had the wrong sign (cDPO has minus); the loss is unbiased under flipped labels and may be negative."""
import math
import torch

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2n, time]: n chosen rows, then their n rejected rows", "loss_mask": "1 on completion tokens, [2n, time]; column 0 never", "ref_logprobs": "summed log-probability of each row under the reference, [2n]"}
SETTINGS = {"beta": "DPO beta, 0.1", "eps": "assumed rate of flipped labels, 0.2 (below 0.5)"}
NOTES = "Preference loss, log-probabilities are summed over the completion tokens of a row, mean over pairs. First half of the rows chosen, second half rejected, same order. Reference values are constants. An even number of rows is needed."

class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (6, 11))
    mask = torch.zeros(6, 11)
    for i in range(6):
        mask[i, 4:6 + i % 5] = 1
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "ref_logprobs": -3.4 * mask.sum(1) + torch.randn(6)}


def right(model, batch, beta=0.1, eps=0.2):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    gain = (lp * mask).sum(1) - batch["ref_logprobs"]
    chosen, rejected = gain.chunk(2)
    h = beta * (chosen - rejected)
    ls = torch.nn.functional.logsigmoid
    loss = (-(1 - eps) * ls(h) + eps * ls(-h)) / (1 - 2 * eps)
    return loss.mean(), {"accuracy": (h > 0).float().mean().item()}


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss, met = right(m, b); loss.backward()
    lp = torch.log_softmax(m(b["ids"]), -1)
    s = [sum(lp[i, t - 1, b["ids"][i, t]].item() for t in range(1, 11) if b["loss_mask"][i, t]) - b["ref_logprobs"][i].item() for i in range(6)]
    f = lambda h: math.log(1 / (1 + math.exp(-h)))
    want = sum((-0.8 * f(0.1 * (s[i] - s[i + 3])) + 0.2 * f(-0.1 * (s[i] - s[i + 3]))) / 0.6 for i in range(3)) / 3
    # unbiased: the expectation over flips with rate eps is the plain DPO loss
    r = lambda h: (-0.8 * f(h) + 0.2 * f(-h)) / 0.6
    assert abs(0.8 * r(0.7) + 0.2 * r(-0.7) + f(0.7)) < 1e-9
    print(loss.item(), want, met, m.head.weight.grad.norm().item()); assert abs(loss.item() - want) < 1e-4

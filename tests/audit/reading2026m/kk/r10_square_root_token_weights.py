"""Square averaging (InternVL 2.5, arXiv 2412.05271). The weight of a token is one over the square root of its answer's number of trained tokens: neither the mean over tokens nor the mean over
samples, and the denominator is the sum of weights, not a count."""
import torch
import torch.nn as nn

FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {
    "ids": "token ids of several samples packed one after the other, [rows, time]",
    "sample_ids": "number of the sample of each token, from 1, unique within the row, rising; 0 for padding at the end, [rows, time]",
    "position_ids": "position of each token inside its sample, from 0, [rows, time]",
    "loss_mask": "1 where the token is a trained target, [rows, time]; 0 for the first token of a sample, for its prompt and for padding",
}
SETTINGS = {}
NOTES = (
    "Next-token cross-entropy over packed samples with square averaging. Each trained token weighs w = x^-0.5, where x is the number of trained tokens of its own sample in its own row; the loss is sum(w*nll)/sum(w) over all trained tokens of all rows together, so a sample has total weight sqrt(x). "
    "Samples do not attend to each other (the model builds a causal mask from sample_ids) and positions start at 0 in each sample. Token t is predicted from column t-1. The weights are constants. All parameters are used; any number of rows."
)


class PosAttention(nn.Module):
    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(8, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab)

    def forward(self, ids, sample_ids, position_ids):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        see = (sample_ids[:, :, None] == sample_ids[:, None]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        return self.head(x + (q @ k.transpose(1, 2) / 4).masked_fill(~see, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(1, 29, (3, 24), generator=g)
    sid, pos, mask = torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 24)
    for r in range(3):
        t = 0
        for n in range(1, 4):
            size, p = int(torch.randint(4, 9, (1,), generator=g)), int(torch.randint(1, 4, (1,), generator=g))
            sid[r, t:t + size], pos[r, t:t + size], mask[r, t + p:t + size] = n, torch.arange(size), 1
            t += size
    return {"model": PosAttention(), "ids": ids * (sid > 0), "sample_ids": sid, "position_ids": pos, "loss_mask": mask}


def right(model, batch):
    ids, sid, m = batch["ids"], batch["sample_ids"], batch["loss_mask"]
    same = (sid[:, :, None] == sid[:, None]).to(m.dtype)
    count = (same * m[:, None]).sum(-1)
    w = m * count.clamp(min=1).rsqrt()
    lp = model(ids, sid, batch["position_ids"])[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(lp * w[:, 1:]).sum() / w.sum()


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        loss = right(model, d)
        loss.backward()
        assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
        num = den = 0.0
        for r in range(3):
            for k in range(1, 4):
                on = d["sample_ids"][r] == k
                one, m = d["ids"][r][on][None], d["loss_mask"][r][on]
                lp = model(one, torch.ones_like(one), torch.arange(one.shape[1])[None]).detach().log_softmax(-1)
                nll = [-lp[0, t - 1, one[0, t]].item() for t in range(one.shape[1]) if m[t]]
                num, den = num + sum(nll) / len(nll) ** 0.5, den + len(nll) ** 0.5
        print("seed", seed, "loss %.6f explicit %.6f" % (loss.item(), num / den))
        assert abs(loss.item() - num / den) < 1e-5

"""Zigzag context parallelism: rank r of W holds the sequence chunks r and 2W-1-r, so its positions jump and the last token of its
first chunk is not followed by the next row entry. Labels are shifted BEFORE the sharding, so the per-rank loss shifts nothing.
Balanced causal work (Llama 3 paper section 3.3.2, Megatron-LM get_batch_on_this_cp_rank, zigzag ring attention)."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; time divisible by 2 * cp_ranks",
          "loss_mask": "1 where the token (as a target) is trained, [rows, time]; column 0 is never a target"}
SETTINGS = {"cp_ranks": "context-parallel ranks, 2"}
NOTES = ("Reduction: sum of token losses over all ranks / number of trained tokens over all ranks (mean over trained tokens of all rows). "
         "Next-token cross entropy; the shift is made on the full sequence, the last position has the target -100. "
         "time must be divisible by 2*cp_ranks; any number of rows. Keys and values of all ranks are gathered with gradients, masked by absolute position. "
         "All parameters are used.")


class Attn(torch.nn.Module):
    """One causal attention layer that accepts queries at arbitrary positions."""
    def __init__(self, vocab=29, width=16, max_time=64):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.pos = torch.nn.Embedding(max_time, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(width, vocab)

    def hidden(self, ids, pos):
        return self.emb(ids) + self.pos(pos)

    def attend(self, h, pos, keys, values, key_pos):
        s = self.q(h) @ keys.transpose(1, 2) / h.shape[-1] ** 0.5
        s = s.masked_fill(key_pos[None, :] > pos[:, None], float("-inf"))
        return self.out(h + s.softmax(-1) @ values)

    def forward(self, ids):
        pos = torch.arange(ids.shape[1])
        h = self.hidden(ids, pos)
        return self.attend(h, pos, self.k(h), self.v(h), pos)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    mask = (torch.rand(3, 16, generator=g) < 0.7).long()
    mask[:, 0] = 0
    mask[:, 5] = 1
    return {"model": Attn(), "ids": torch.randint(0, 29, (3, 16), generator=g), "loss_mask": mask}


def right(model, batch, cp_ranks=2):
    ids, mask = batch["ids"], batch["loss_mask"]
    rows, time = ids.shape
    assert time % (2 * cp_ranks) == 0
    target = ids.masked_fill(mask == 0, -100)
    labels = torch.cat([target[:, 1:], target.new_full((rows, 1), -100)], 1)     # shift once, on the full sequence
    chunk = torch.arange(time).view(2 * cp_ranks, -1)
    shards = [torch.cat([chunk[r], chunk[2 * cp_ranks - 1 - r]]) for r in range(cp_ranks)]
    hs = [model.hidden(ids[:, p], p) for p in shards]
    keys = torch.cat([model.k(h) for h in hs], 1)             # all-gather with gradient (ring in reality)
    values = torch.cat([model.v(h) for h in hs], 1)
    key_pos = torch.cat(shards)
    total, count = 0.0, 0
    for h, p in zip(hs, shards):
        logits = model.attend(h, p, keys, values, key_pos)
        y = labels[:, p]
        total = total + F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        count = count + (y != -100).sum()
    return total / count.clamp(min=1)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        for w in (1, 2, 4):
            model.zero_grad()
            loss = right(model, d, cp_ranks=w)
            loss.backward()
            grad = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            lp = model(d["ids"]).log_softmax(-1)
            terms = [-lp[i, t - 1, d["ids"][i, t]] for i in range(3) for t in range(1, 16) if d["loss_mask"][i, t]]
            ref = torch.stack(terms).mean()
            ref.backward()
            err = max((a - p.grad).abs().max().item() for a, p in zip(grad, model.parameters()))
            print(f"W={w} loss {loss:.6f} loop {ref:.6f} grad error {err:.1e}")
            assert abs(loss - ref) < 1e-5 and err < 1e-5 and all(g.abs().sum() > 0 for g in grad)

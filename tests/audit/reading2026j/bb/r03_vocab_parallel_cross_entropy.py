"""Vocab-parallel cross entropy: each rank owns a slice of the vocabulary; targets outside the slice are rewritten to id 0 and their
logit is then set to 0 before a SUM over ranks, and the maximum is taken over ranks without a gradient. Looks as if wrong targets were
trained on token 0, but the masked terms vanish (Megatron-LM tensor_parallel/cross_entropy.py)."""
import torch

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "target ids, already shifted, [rows, time]; entries at loss_mask 0 are legal ids but ignored",
          "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"tp_ranks": "tensor-parallel ranks that split the vocabulary, 4"}
NOTES = ("Reduction: mean over the trained tokens of all rows. Cross entropy with hard labels; labels are already shifted. "
         "vocab (32) must be divisible by tp_ranks. The maximum over the logits is a constant (its gradient cancels). All parameters are used.")


class LM(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mix = torch.nn.Linear(width, width)
        self.head = torch.nn.Parameter(torch.randn(vocab, width) * 0.3)

    def hidden(self, ids):
        h = self.emb(ids)
        return torch.tanh(self.mix(h.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]))

    def forward(self, ids):
        return self.hidden(ids) @ self.head.T


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    stream = torch.randint(0, 32, (4, 11), generator=g)
    mask = (torch.rand(4, 10, generator=g) < 0.6).float()
    mask[0, 0] = 1
    return {"model": LM(), "ids": stream[:, :-1], "labels": stream[:, 1:].clone(), "loss_mask": mask}


def right(model, batch, tp_ranks=4):
    vocab = model.head.shape[0]
    assert vocab % tp_ranks == 0
    per = vocab // tp_ranks
    h = model.hidden(batch["ids"])
    local = [h @ model.head[r * per:(r + 1) * per].T for r in range(tp_ranks)]
    top = torch.stack([x.detach().amax(-1) for x in local]).amax(0)               # all-reduce MAX, constant
    picked, expsum = 0.0, 0.0
    for r, x in enumerate(local):
        x = x - top[..., None]
        outside = (batch["labels"] < r * per) | (batch["labels"] >= (r + 1) * per)
        t = (batch["labels"] - r * per).masked_fill(outside, 0)                    # 0 is only a placeholder
        own = x.gather(-1, t[..., None])[..., 0].masked_fill(outside, 0.0)
        picked = picked + own                                                       # all-reduce SUM
        expsum = expsum + x.exp().sum(-1)                                           # all-reduce SUM
    nll = expsum.log() - picked
    return (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        for w in (1, 2, 4, 8):
            model.zero_grad()
            loss = right(model, d, tp_ranks=w)
            loss.backward()
            grad = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            lp = model(d["ids"]).log_softmax(-1)
            ref = torch.stack([-lp[i, t, d["labels"][i, t]] for i in range(4) for t in range(10) if d["loss_mask"][i, t]]).mean()
            ref.backward()
            err = max((a - p.grad).abs().max().item() for a, p in zip(grad, model.parameters()))
            print(f"TP={w} loss {loss:.6f} loop {ref:.6f} grad error {err:.1e}")
            assert abs(loss - ref) < 1e-5 and err < 1e-5 and all(g.abs().sum() > 0 for g in grad)

"""A loss summed over sequences and divided by a constant is averaged over ranks as well. verl-project/verl#5366,
https://github.com/verl-project/verl/pull/5366, 2026.
In the mode seq-mean-token-sum-norm (Dr. GRPO) the loss is the sum of sequence losses over a fixed scale. The other modes multiply by the number of
data-parallel ranks because FSDP averages gradients over ranks; this mode did not, so its gradient shrank with the number of ranks."""
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one list of micro-batches for each data-parallel rank: ids [rows, time], advantages [rows], loss_mask [rows, time]"}
SETTINGS = {"loss_scale_factor": "fixed divisor of the summed loss (number of sequences times the length limit), 96.0"}
NOTES = ("Dr. GRPO policy gradient: sum over all sequences and tokens of the global batch of -advantage * log p, divided by the constant. It must not depend on how "
         "the sequences are spread over ranks and micro-batches. Gradients of ranks are averaged (FSDP). One step. Advantages are constants.")


class Tiny(nn.Module):
    def __init__(self, V=24, D=8):
        super().__init__()
        self.emb, self.out = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(torch.tanh(self.emb(ids)))


def _seq_losses(model, mb):
    lp = model(mb["ids"][:, :-1]).log_softmax(-1).gather(-1, mb["ids"][:, 1:, None])[..., 0]
    return (-lp * mb["advantages"][:, None] * mb["loss_mask"][:, 1:]).sum(-1)


def _fsdp(model, optimizer, batches, loss_of):
    optimizer.zero_grad()
    dp = len(batches)
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for rank in batches:
        local = [torch.zeros_like(p) for p in model.parameters()]
        for mb in rank:
            for a, g in zip(local, torch.autograd.grad(loss_of(mb), list(model.parameters()))):
                a += g
        for a, g in zip(grads, local):
            a += g / dp
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    optimizer.step()


def broken(model, optimizer, batches, loss_scale_factor=96.0):
    _fsdp(model, optimizer, batches, lambda mb: _seq_losses(model, mb).sum() / loss_scale_factor)


def right(model, optimizer, batches, loss_scale_factor=96.0):
    dp_size = len(batches)
    _fsdp(model, optimizer, batches, lambda mb: _seq_losses(model, mb).sum() / loss_scale_factor * dp_size)


def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    mb = lambda: {"ids": torch.randint(0, 24, (2, 9)), "advantages": torch.randn(2),
                  "loss_mask": (torch.arange(9)[None] < torch.randint(4, 10, (2, 1))).float()}
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "batches": [[mb(), mb()] for _ in range(3)]}


if __name__ == "__main__":
    vec = lambda m: torch.cat([p.detach().flatten() for p in m.parameters()])
    out = {}
    for n, f in (("broken", broken), ("right", right)):
        x = make(0)
        w = vec(x["model"])
        f(**x)
        out[n] = vec(x["model"]) - w
    x = make(0)
    flat = [[mb for r in x["batches"] for mb in r]]
    w = vec(x["model"])
    right(x["model"], x["optimizer"], flat)
    ref = vec(x["model"]) - w
    print("step norm: broken", float(out["broken"].norm()), "right", float(out["right"].norm()), "one rank", float(ref.norm()))
    assert torch.allclose(out["right"], ref, atol=1e-6) and not torch.allclose(out["broken"], ref, atol=1e-4)

"""Each data-parallel rank divides by its own token count before the gradients are averaged. PrimeIntellect-ai/prime-rl#2358 (fix #2562),
https://github.com/PrimeIntellect-ai/prime-rl/issues/2358, 2026.
The RL trainer computed loss_scale = trained tokens of this rank and divided the summed loss by it; FSDP then averages the ranks' gradients.
With unequal token counts the result is not the mean over the tokens of the global batch: tokens on ranks with few tokens count more."""
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one list of micro-batches for each rank; a micro-batch is a dict ids [rows, time], advantages [rows, time], loss_mask [rows, time]"}
SETTINGS = {}
NOTES = ("Policy gradient, -advantage * log p, mean over all trained tokens of all ranks and micro-batches. Ranks are simulated: gradients of the ranks "
         "are averaged, as FSDP does. One optimizer step. Advantages are constants.")


class Bigram(nn.Module):
    def __init__(self, V=30, D=12):
        super().__init__()
        self.emb, self.out = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(self.emb(ids))


def _token_loss_sum(model, mb):
    lp = model(mb["ids"][:, :-1]).log_softmax(-1).gather(-1, mb["ids"][:, 1:, None])[..., 0]
    return -(lp * mb["advantages"][:, 1:] * mb["loss_mask"][:, 1:]).sum()


def _count(mb):
    return mb["loss_mask"][:, 1:].sum()


def broken(model, optimizer, batches):
    optimizer.zero_grad()
    for rank in batches:
        loss_scale = max(sum(_count(mb) for mb in rank), 1)
        for mb in rank:
            loss = _token_loss_sum(model, mb) / loss_scale
            (loss / len(batches)).backward()              # FSDP averages over ranks
    optimizer.step()


def right(model, optimizer, batches):
    optimizer.zero_grad()
    loss_scale = max(sum(_count(mb) for rank in batches for mb in rank), 1)
    for rank in batches:
        for mb in rank:
            loss = _token_loss_sum(model, mb) / loss_scale
            (loss / len(batches)).backward()              # FSDP averages over ranks
    for p in model.parameters():
        p.grad.mul_(len(batches))                         # the average becomes a sum
    optimizer.step()


def make(seed):
    torch.manual_seed(seed)
    model = Bigram()
    batches = []
    for rank in range(3):
        mbs = []
        for _ in range(2):
            ids = torch.randint(0, 30, (2, 12))
            n = torch.randint(3, 12, (2, 1))
            mbs.append({"ids": ids, "advantages": torch.randn(2, 1).expand(2, 12).contiguous(),
                        "loss_mask": (torch.arange(12)[None] < n).float()})
        batches.append(mbs)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


if __name__ == "__main__":
    def run(f):
        x = make(0)
        f(**x)
        return torch.cat([p.detach().flatten() for p in x["model"].parameters()])
    x = make(0)
    start = torch.cat([p.detach().flatten() for p in x["model"].parameters()])
    allmb = [mb for r in x["batches"] for mb in r]
    x["optimizer"].zero_grad()
    (sum(_token_loss_sum(x["model"], m) for m in allmb) / sum(_count(m) for m in allmb)).backward()
    x["optimizer"].step()
    one = torch.cat([p.detach().flatten() for p in x["model"].parameters()])
    a, b = run(broken), run(right)
    print("step norm: broken", float((a - start).norm()), "right", float((b - start).norm()), "one process", float((one - start).norm()))
    print("relative error of broken", float((a - one).norm() / (one - start).norm()))
    assert torch.allclose(b, one, atol=1e-6) and not torch.allclose(a, one, atol=1e-4)

"""The multi-token-prediction gradient is divided by the context-parallel size. NVIDIA/Megatron-LM#3959,
https://github.com/NVIDIA/Megatron-LM/pull/3959, 2026. Gradients are averaged over the context-parallel ranks, each of which holds a slice of the sequence;
the main loss and the MoE auxiliary loss are scaled up by cp_size to make up for it, the MTP loss was not. Its weight shrank with --context-parallel-size."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "micro-batches of one optimizer step: {ids: token ids, [rows, time]}; the time axis is cut evenly over the context ranks"}
SETTINGS = {"cp": "context-parallel ranks, 2; it divides the number of positions", "mtp_weight": "weight of the MTP loss, 0.3"}
NOTES = ("One SGD step. Loss of a micro-batch: mean next-token cross entropy plus mtp_weight times the mean cross entropy of the head that predicts one "
         "token further; mean over micro-batches (all have the same shape). The ranks are simulated: each computes the loss of its positions, gradients are averaged over ranks. "
         "The step must not depend on cp.")

class TwoHeads(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.rnn = torch.nn.GRU(width, width, batch_first=True)
        self.head, self.mtp = torch.nn.Linear(width, vocab), torch.nn.Linear(width, vocab)

def make(seed):
    torch.manual_seed(seed)
    return {"model": TwoHeads(), "batches": [{"ids": torch.randint(0, 32, (2, 10))} for _ in range(3)]}

def losses(model, ids):
    h = model.rnn(model.emb(ids))[0][:, :-2]
    main = F.cross_entropy(model.head(h).transpose(1, 2), ids[:, 1:-1], reduction="none")
    mtp = F.cross_entropy(model.mtp(h).transpose(1, 2), ids[:, 2:], reduction="none")
    return main, mtp

def step(model, optimizer, batches, cp, mtp_weight, mtp_scale):
    optimizer.zero_grad()
    for batch in batches:
        main, mtp = losses(model, batch["ids"])
        tokens, width = main.numel(), main.shape[1] // cp
        for rank in range(cp):
            own = slice(rank * width, (rank + 1) * width)
            loss = main[:, own].sum() / tokens * cp
            loss = loss + mtp_weight * mtp[:, own].sum() / tokens * mtp_scale
            (loss / len(batches) / cp).backward(retain_graph=True)  # the /cp is the average over ranks
    optimizer.step()

def broken(model, optimizer, batches, cp=2, mtp_weight=0.3):
    step(model, optimizer, batches, cp, mtp_weight, mtp_scale=1)

def right(model, optimizer, batches, cp=2, mtp_weight=0.3):
    step(model, optimizer, batches, cp, mtp_weight, mtp_scale=cp)

def after(update, made, **settings):
    model = copy.deepcopy(made["model"])
    update(model, torch.optim.SGD(model.parameters(), lr=0.5), made["batches"], **settings)
    return torch.cat([p.detach().flatten() for p in model.parameters()])

if __name__ == "__main__":
    made = make(0)
    one, a, b = after(right, made, cp=1), after(broken, made), after(right, made)
    print("distance to one rank: broken", float((a - one).norm()), "right", float((b - one).norm()))
    assert (a - one).norm() > 1e-3 > 1e-5 > (b - one).norm()

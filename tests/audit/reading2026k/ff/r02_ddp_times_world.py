"""Loss multiplied by the number of ranks. Data parallel wrappers average gradients over ranks; to get the mean over the tokens of
the whole global batch each rank backpropagates sum(loss) * world_size / global_tokens for every micro-batch, with no division by the
number of micro-batches (transformers Trainer with average_tokens_across_devices, torchtune, open-instruct). Looks like a gradient
that is too large by world_size."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "schedules, updates, and saved or cached state"
KIND = "update"
INPUTS = {"model": "tiny module, ids [rows, time] -> logits", "batches": "list of optimizer steps; a step is a list of ranks (2); a rank is a list of micro-batches (3); a micro-batch is a dict with ids [rows, time] and loss_mask [rows, time] (1 where the token is a target; column 0 is 0)"}
SETTINGS = {"lr": "learning rate, 0.1 (in the optimizer, plain SGD)"}
NOTES = ("One optimizer step per element of batches. Gradient: mean over all trained tokens of all ranks and micro-batches of the step of the next-token cross entropy. "
         "Ranks are simulated one after the other; the averaging over ranks is a mean of the ranks' gradients. Trained token counts differ between micro-batches and ranks. No clipping.")


class Tiny(torch.nn.Module):
    def __init__(self, v=19, d=10):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.rnn = torch.nn.GRU(d, d, batch_first=True)
        self.out = torch.nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def make_optimizer(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def make(seed):
    torch.manual_seed(seed)
    model, steps = Tiny(), []
    for _ in range(2):
        step = []
        for r in range(2):
            micro = []
            for m in range(3):
                mask = (torch.rand(2, 8) < (0.2 + 0.25 * (r + m))).float()
                mask[:, 0] = 0
                mask[0, 3] = 1
                micro.append({"ids": torch.randint(0, 19, (2, 8)), "loss_mask": mask})
            step.append(micro)
        steps.append(step)
    return {"model": model, "batches": steps}


def _sum_loss(model, mb):
    nll = F.cross_entropy(model(mb["ids"][:, :-1]).flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="none")
    return (nll * mb["loss_mask"][:, 1:].flatten()).sum()


def right(model, optimizer, batches):
    params = list(model.parameters())
    for step in batches:
        world = len(step)
        global_tokens = sum(mb["loss_mask"].sum() for rank in step for mb in rank)
        per_rank = []
        for rank in step:
            optimizer.zero_grad()
            for mb in rank:
                (_sum_loss(model, mb) * world / global_tokens).backward()
            per_rank.append([p.grad.clone() for p in params])
        for p, *grads in zip(params, *per_rank):
            p.grad = torch.stack(grads).mean(0)
        optimizer.step()


if __name__ == "__main__":
    c = make(0)
    a, b = c["model"], copy.deepcopy(c["model"])
    right(a, make_optimizer(a), c["batches"])
    opt = make_optimizer(b)
    for step in c["batches"]:
        opt.zero_grad()
        mbs = [mb for rank in step for mb in rank]
        ids, mask = torch.cat([m["ids"] for m in mbs]), torch.cat([m["loss_mask"] for m in mbs])
        (_sum_loss(b, {"ids": ids, "loss_mask": mask}) / mask.sum()).backward()
        opt.step()
    d = max(float((p - q).abs().max()) for p, q in zip(a.parameters(), b.parameters()))
    moved = max(float((p - q).abs().max()) for p, q in zip(a.parameters(), make(0)["model"].parameters()))
    print("difference to one big batch", d, "moved by", moved)
    assert d < 1e-6 < moved

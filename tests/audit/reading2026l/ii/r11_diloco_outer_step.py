"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105; torchft, OpenDiLoCo): after H local AdamW steps per worker the outer optimizer (SGD, Nesterov) gets old weights minus the average of the workers' weights as its gradient. The sign looks reversed, the weights are set back before the step, and the inner optimizers are not reset."""
import copy
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "network x [n, 4] -> logits [n, 3]: the global weights", "optimizer": "outer optimizer over the model: SGD, lr 0.7, Nesterov momentum 0.9",
          "batches": "list over rounds; each a list over workers; each a list of H dicts x [n, 4], y [n]"}
SETTINGS = {"inner_lr": "AdamW rate of the workers, 0.01"}
NOTES = ("Per round: every worker starts from the global weights and takes H local AdamW steps (weight decay 0) on the cross-entropy (mean over rows) of its own batches; its AdamW moments persist over rounds. Then the outer gradient of each parameter is "
         "global weights before the round - mean over workers of the weights after it (unweighted mean), and the outer optimizer takes one step from the weights before the round. Outer lr 1 without momentum would give the mean of the workers. "
         "No gradient flows through the inner steps. Any number of workers and rounds.")


def make(seed, rounds=3, workers=2, H=4):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    bs = [[[{"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,))} for _ in range(H)] for _ in range(workers)] for _ in range(rounds)]
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True), "batches": bs}


def right(model, optimizer, batches, inner_lr=0.01):
    W = len(batches[0])
    locals_ = [copy.deepcopy(model) for _ in range(W)]
    inner = [torch.optim.AdamW(m.parameters(), lr=inner_lr, weight_decay=0.0) for m in locals_]
    for rnd in batches:
        for m, o, bs in zip(locals_, inner, rnd):
            with torch.no_grad():
                for p, g in zip(m.parameters(), model.parameters()):
                    p.copy_(g)
            for b in bs:
                o.zero_grad()
                F.cross_entropy(m(b["x"]), b["y"]).backward()
                o.step()
        for k, g in enumerate(model.parameters()):
            mean = torch.stack([list(m.parameters())[k].detach() for m in locals_]).mean(0)
            g.grad = g.detach() - mean
        optimizer.step()


if __name__ == "__main__":
    def loss(m, bs):
        return sum(F.cross_entropy(m(b["x"]), b["y"]).item() for r in bs for w in r for b in w)
    i = make(0); a = loss(i["model"], i["batches"]); right(**i); print("loss", a, "->", loss(i["model"], i["batches"]))
    # one worker, one round, lr 1, no momentum: identical to plain local training
    i = make(0, rounds=1, workers=1); ref = copy.deepcopy(i["model"]); o = torch.optim.AdamW(ref.parameters(), lr=0.01, weight_decay=0.0)
    i["optimizer"] = torch.optim.SGD(i["model"].parameters(), lr=1.0); right(**i)
    for b in i["batches"][0][0]:
        o.zero_grad(); F.cross_entropy(ref(b["x"]), b["y"]).backward(); o.step()
    print("error", max((p - q).abs().max().item() for p, q in zip(ref.parameters(), i["model"].parameters())))

"""ULMFiT schedule (Howard & Ruder 2018): slanted triangle x discriminative rates x gradual unfreezing. A torch LambdaLR with one lambda per layer group:
lower layers have a factor of exactly 0 until their turn comes, and each group's base rate is 2.6 times smaller than that of the group above."""
import torch, torch.nn as nn

FAMILY = "schedule"
KIND = "schedule"
INPUTS = {"optimizer": "SGD with one parameter group per layer, the TOP layer first, rates already divided by 2.6 per group"}
SETTINGS = {"total": "60 steps", "cut": "share of warm-up, 0.1", "ratio": "how much smaller the lowest rate is, 32", "unfreeze_every": "a new group every 10 steps"}
NOTES = ("Makes a torch scheduler; call scheduler.step() once after each optimizer step. Frozen groups get gradients but rate 0; with plain SGD (no "
         "momentum, no weight decay) they do not move. Needs as many lambdas as groups.")


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    layers = [net[4], net[2], net[0]]
    opt = torch.optim.SGD([{"params": l.parameters(), "lr": 0.1 / 2.6 ** i} for i, l in enumerate(layers)])
    return {"model": net, "optimizer": opt}


def right(optimizer, total=60, cut=0.1, ratio=32, unfreeze_every=10):
    top = int(total * cut)

    def triangle(step):
        step = min(step, total)
        p = step / top if step < top else 1 - (step - top) / (total - top)
        return (1 + p * (ratio - 1)) / ratio

    def for_group(i):
        return lambda step: 0.0 if step < i * unfreeze_every else triangle(step)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [for_group(i) for i in range(len(optimizer.param_groups))])


if __name__ == "__main__":
    d = make(0); net, opt = d["model"], d["optimizer"]; sch = right(opt)
    first = {i: net[i].weight.detach().clone() for i in (0, 2, 4)}
    moved, seen = {}, []
    for step in range(60):
        seen.append([g["lr"] for g in opt.param_groups])
        opt.zero_grad(); net(torch.randn(16, 4)).square().mean().backward(); opt.step(); sch.step()
        for i in first:
            if i not in moved and not torch.equal(first[i], net[i].weight):
                moved[i] = step
    print("first step in which each layer moved", moved, [f"{x[0]:.4f}" for x in seen[::10]])
    assert moved == {4: 0, 2: 10, 0: 20}
    assert abs(seen[6][0] - 0.1) < 1e-9 and abs(seen[0][0] - 0.1 / 32) < 1e-9 and abs(seen[30][2] * 2.6 ** 2 - seen[30][0]) < 1e-9

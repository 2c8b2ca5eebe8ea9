"""Gradual unfreezing as a torch scheduler with one lambda per parameter group (ULMFiT, BEiT layer decay). LambdaLR multiplies the group's own base rate, so the lambdas
return factors; deeper groups have factor exactly 0 for some steps and a smaller base rate, which looks like frozen parameters."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "a torch optimizer whose groups are ordered from the head (first) to the embedding (last)"}
SETTINGS = {"every": "steps between the release of one group and the next, 5", "ramp": "steps of linear ramp after release, 4"}
NOTES = ("right makes a torch scheduler, to be stepped once per optimizer step. Group g has rate 0 before step g * every, then ramps over ramp steps to its own "
         "base rate. Base rates come from the optimizer and already hold the layer decay 0.5 ** g.")
import torch
import torch.nn as nn


def make(seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)]
    groups = [{"params": list(l.parameters()), "lr": 1e-2 * 0.5 ** g} for g, l in enumerate(layers)]
    return {"optimizer": torch.optim.SGD(groups, lr=1e-2)}


def right(optimizer, every=5, ramp=4):
    def factor_of(group):
        def factor(step):
            since = step - group * every
            return 0.0 if since < 0 else min(1.0, (since + 1) / ramp)
        return factor
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor_of(g) for g in range(len(optimizer.param_groups))])


if __name__ == "__main__":
    opt = make(0)["optimizer"]
    sched = right(opt)
    for step in range(20):
        got = [g["lr"] for g in opt.param_groups]
        want = [0.0 if step < 5 * g else 1e-2 * 0.5 ** g * min(1, (step - 5 * g + 1) / 4) for g in range(3)]
        assert max(abs(a - b) for a, b in zip(got, want)) < 1e-12, (step, got, want)
        if step in (0, 6, 19):
            print(step, got)
        opt.step()
        sched.step()

"""Groups with different clocks. The layers below get geometrically smaller LRs, and all but the head stay at LR exactly 0
for the first steps (linear probing before fine-tuning); then each group has its own warmup that starts at the unfreezing
step. The head meanwhile decays from step 0. A scheduler with one lambda per group, in the order of the groups."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer with one group per layer, lowest layer first, head last; group LR = peak LR"}
SETTINGS = {"freeze": "steps with the body at LR 0, 5", "warmup": "warmup steps of the body after that, 4", "total": "steps of the run, 30",
            "decay": "factor per layer below the head, 0.5"}
NOTES = ("Makes a torch LambdaLR, stepped after each optimizer step. The head goes linearly from its peak to 0 at `total`. Body "
         "layer at depth d below the head: 0 before `freeze`, then peak * decay**d * warmup * the same linear decay.")
import torch


def make(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    return {"optimizer": torch.optim.SGD([{"params": l.parameters(), "lr": 0.1} for l in layers], lr=0.1)}


def right(optimizer, freeze=5, warmup=4, total=30, decay=0.5):
    depth = len(optimizer.param_groups)

    def body(below):
        def factor(step):
            if step < freeze:
                return 0.0
            return decay ** below * min(1.0, (step - freeze + 1) / warmup) * max(0.0, 1 - step / total)
        return factor

    lambdas = [body(depth - 1 - i) for i in range(depth - 1)] + [lambda step: max(0.0, 1 - step / total)]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)


if __name__ == "__main__":
    opt = make(0)["optimizer"]
    sched = right(opt)
    for step in range(31):
        head = 0.1 * max(0.0, 1 - step / 30)
        want = [0.0 if step < 5 else 0.5 ** b * min(1.0, (step - 4) / 4) * head for b in (2, 1)] + [head]
        got = [g["lr"] for g in opt.param_groups]
        assert max(abs(a - b) for a, b in zip(got, want)) < 1e-12, (step, got, want)
        if step in (0, 4, 5, 8, 20, 30):
            print(step, [round(x, 5) for x in got])
        opt.step()
        sched.step()

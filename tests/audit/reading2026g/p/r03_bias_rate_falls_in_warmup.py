"""Warmup that goes down for the biases. YOLOv5/Ultralytics warm the weights up from 0 while the biases start at 0.1, ten times the base rate, and fall to the common curve (warmup_bias_lr); it lets the detection head's biases settle first."""
import torch
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "SGD with two groups that carry the key 'name': 'weights' and 'biases', each with base rate 0.01"}
SETTINGS = {"warmup": "warmup steps, 30", "total": "steps of the run, 300", "bias_start": "absolute rate of the biases at step 0, 0.1", "final": "last share of the base rate, 0.01"}
NOTES = "Makes a torch LambdaLR with one lambda per group, chosen by the group's name. bias_start is an absolute rate, so the lambda divides it by the group's base rate and the multiplier is above 1. Weights have rate exactly 0 at step 0. After the warmup both groups share one linear decay that has been running since step 0. To be stepped once per optimizer step."
def make(seed):
    torch.manual_seed(seed)
    m = torch.nn.Linear(4, 3)
    opt = torch.optim.SGD([{"params": [m.weight], "name": "weights"}, {"params": [m.bias], "name": "biases"}], lr=0.01, momentum=0.9)
    return {"optimizer": opt}
def right(optimizer, warmup=30, total=300, bias_start=0.1, final=0.01):
    def decay(s):
        return max(1 - s / total, 0.0) * (1 - final) + final
    def curve(group):
        start = bias_start / group["lr"] if group["name"] == "biases" else 0.0
        def f(s):
            if s < warmup:
                return start + (decay(s) - start) * s / warmup
            return decay(s)
        return f
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [curve(g) for g in optimizer.param_groups])
if __name__ == "__main__":
    opt = make(0)["optimizer"]
    sch = right(opt)
    w, b = [], []
    for s in range(320):
        w.append(opt.param_groups[0]["lr"]); b.append(opt.param_groups[1]["lr"])
        opt.step(); sch.step()
    assert w[0] == 0 and abs(b[0] - 0.1) < 1e-12
    assert all(x < y for x, y in zip(w[:28], w[1:29])) and all(x > y for x, y in zip(b[:300], b[1:301]))
    assert all(abs(x - y) < 1e-15 for x, y in zip(w[30:], b[30:])) and abs(w[319] - 1e-4) < 1e-12
    for s in range(30):   # numpy-like interp by hand
        d = 0.01 * ((1 - s / 300) * 0.99 + 0.01)
        assert abs(w[s] - s / 30 * d) < 1e-12 and abs(b[s] - ((1 - s / 30) * 0.1 + s / 30 * d)) < 1e-12
    print("ok", w[0], b[0], w[15], b[15], w[30], b[30], w[319])

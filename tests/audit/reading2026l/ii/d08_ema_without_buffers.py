"""The EMA teacher keeps its first batch-norm statistics. saltoricristiano/cosmix-uda#21, https://github.com/saltoricristiano/cosmix-uda/issues/21, 2026.
The momentum update of the teacher ran over the parameters only and forgot the buffers, and the teacher is in eval mode. Its running means and variances stay those
of the beginning and fit its weights less with every step, so the pseudo-labels get worse over time."""
import copy
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "module with two copies of one network: model.student (trained) and model.teacher (exponential average, in eval mode)", "optimizer": "SGD over the student's parameters only",
          "batches": "list of dicts: x [n, 6] labelled inputs, y [n] classes, u [n, 6] unlabelled inputs"}
SETTINGS = {"tau": "momentum of the teacher, 0.9"}
NOTES = ("Per batch: the teacher (eval mode, no gradient) gives pseudo-labels (argmax) for u; the student (train mode) takes one step on cross-entropy(x, y) + cross-entropy(u, pseudo-labels), each a mean over rows; "
         "then the teacher becomes an exponential moving average of the student's complete inference state: parameters and floating-point buffers (batch-norm running mean and variance) as tau*teacher + (1-tau)*student, "
         "integer buffers copied. The student is not changed by the averaging; teacher parameters get no gradient.")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
        self.teacher = copy.deepcopy(self.student).eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)


def make(seed):
    torch.manual_seed(seed)
    m = Pair()
    bs = []
    for _ in range(30):
        y = torch.randint(0, 3, (16,))
        x = torch.randn(16, 6) * 2 + 3 + y[:, None].float() * torch.tensor([2., -2, 0, 1, 0, 0])
        bs.append({"x": x, "y": y, "u": x[torch.randperm(16)] + 0.1 * torch.randn(16, 6)})
    return {"model": m, "optimizer": torch.optim.SGD(m.student.parameters(), lr=0.05), "batches": bs}


def _train(model, optimizer, batches, tau, average):
    s, t = model.student.train(), model.teacher.eval()
    for b in batches:
        with torch.no_grad():
            pseudo = t(b["u"]).argmax(-1)
        loss = F.cross_entropy(s(b["x"]), b["y"]) + F.cross_entropy(s(b["u"]), pseudo)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            average(s, t, tau)


def _params(s, t, tau):
    for p, q in zip(s.parameters(), t.parameters()):
        q.mul_(tau).add_(p, alpha=1 - tau)


def _all(s, t, tau):
    _params(s, t, tau)
    for p, q in zip(s.buffers(), t.buffers()):
        if q.is_floating_point():
            q.mul_(tau).add_(p, alpha=1 - tau)
        else:
            q.copy_(p)


def broken(model, optimizer, batches, tau=0.9):
    _train(model, optimizer, batches, tau, _params)


def right(model, optimizer, batches, tau=0.9):
    _train(model, optimizer, batches, tau, _all)


if __name__ == "__main__":
    for f in (broken, right):
        i = make(0)
        f(**i)
        x = torch.cat([b["x"] for b in i["batches"]]); y = torch.cat([b["y"] for b in i["batches"]])
        t = i["model"].teacher
        print(f.__name__, "teacher accuracy", (t(x).argmax(-1) == y).float().mean().item(), "running_mean norm", t[1].running_mean.norm().item())

"""Multi-task loss with learned homoscedastic uncertainty (Kendall, Gal, Cipolla 2018). The task weights are parameters of the
model, the loss may become negative, and the regression term has a half which the classification term has not."""
FAMILY = "multi-task"
KIND = "loss"
INPUTS = {"x": "features, [rows, 6]", "label": "class 0..4, [rows]", "value": "regression target, [rows]",
          "has_value": "1 where the row has a regression target, [rows]"}
SETTINGS = {}
NOTES = ("Reduction: classification is a mean over all rows, regression a mean over the rows that have a value. Multi-task; the "
         "two log-variances are trained parameters; the loss may be negative. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.cls = nn.Linear(16, 5)
        self.reg = nn.Linear(16, 1)
        self.log_var = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.cls(h), self.reg(h).squeeze(-1)


def make(seed):
    torch.manual_seed(seed)
    has = (torch.rand(9) < 0.6).float()
    has[0] = 1.0
    return {"x": torch.randn(9, 6), "label": torch.randint(0, 5, (9,)), "value": torch.randn(9), "has_value": has, "model": TwoTask()}


def right(model, batch):
    logits, pred = model(batch["x"])
    ce = F.cross_entropy(logits, batch["label"])
    has = batch["has_value"]
    mse = ((pred - batch["value"]).pow(2) * has).sum() / has.sum().clamp(min=1.0)
    s_cls, s_reg = model.log_var[0], model.log_var[1]
    loss = torch.exp(-s_cls) * ce + 0.5 * s_cls + 0.5 * torch.exp(-s_reg) * mse + 0.5 * s_reg
    return loss, {"ce": ce.item(), "mse": mse.item()}


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    import math
    d = make(0)
    m = d.pop("model")
    lo, pr = m(d["x"])
    ce = sum(-float(lo[i].log_softmax(-1)[d["label"][i]]) for i in range(9)) / 9
    on = [i for i in range(9) if d["has_value"][i] > 0]
    mse = sum((float(pr[i]) - float(d["value"][i])) ** 2 for i in on) / len(on)
    check(right(m, d)[0], m, math.exp(-0.3) * ce + 0.15 + 0.5 * math.exp(0.2) * mse - 0.1)
    with torch.no_grad():
        m.log_var.fill_(-0.0)
        m.log_var[1] = -20.0
        d["value"] = m(d["x"])[1].clone()
    print("negative loss is legal:", right(m, d)[0].item())

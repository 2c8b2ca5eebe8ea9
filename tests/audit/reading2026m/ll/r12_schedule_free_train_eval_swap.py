"""Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682, facebookresearch/schedule_free). The gradient is taken at y, the weights that are evaluated and saved are the average x, and only z is in the optimizer state: x is recovered from y and z. Hence the optimizer has train() and
eval() that rewrite the model's weights, there is no learning-rate decay, and calling eval() before saving changes the parameters."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"model": "linear regression module with weight and bias", "batches": "list of batches, each a dict x [rows, 5], y [rows, 2]; one update per batch", "save_at": "number of updates after which the run is saved and loaded into a new model and optimizer"}
SETTINGS = {"lr": "constant rate after warmup, 0.1", "beta": "interpolation between z and x, 0.9", "warmup": "number of warmup updates, 3"}
VALUES = {"lr": 0.1, "beta": 0.9, "warmup": 3}
NOTES = """Trains with schedule-free SGD on the mean squared error (mean over all entries of y), saves after save_at updates, goes on from the loaded state, and returns (evaluation weights at the save, evaluation weights at the end), each as one flat vector. Per update k (0-based) with lr_k = lr*min(1, (k+1)/warmup): gradient g at
y = (1-beta) z + beta x; z <- z - lr_k g; x <- (1 - c_k) x + c_k z with c_k = lr_k^2 / sum_{j<=k} lr_j^2; x = z = the initial weights at the start. In training mode the module holds y, in evaluation mode x; the optimizer stores z, the counter and the sum of the weights only. eval() turns y into x = (y - (1-beta) z)/beta,
train() turns it back; a second call of the same mode does nothing. The checkpoint is written in evaluation mode (weights x, optimizer state, mode), and a resumed run continues as the uninterrupted one. There is no decay of the rate by design."""


class ScheduleFreeSGD:
    def __init__(self, params, lr, beta, warmup):
        self.params, self.lr, self.beta, self.warmup = list(params), lr, beta, warmup
        self.z = [p.detach().clone() for p in self.params]
        self.k, self.weight_sum, self.training = 0, 0.0, True

    @torch.no_grad()
    def eval(self):
        if self.training:
            for p, z in zip(self.params, self.z):
                p.lerp_(z, 1 - 1 / self.beta)
            self.training = False

    @torch.no_grad()
    def train(self):
        if not self.training:
            for p, z in zip(self.params, self.z):
                p.lerp_(z, 1 - self.beta)
            self.training = True

    @torch.no_grad()
    def step(self):
        assert self.training, "call train() first"
        lr = self.lr * min(1.0, (self.k + 1) / self.warmup)
        self.weight_sum += lr ** 2
        c = lr ** 2 / self.weight_sum
        for y, z in zip(self.params, self.z):
            g = y.grad
            y.lerp_(z, c).add_(g, alpha=lr * (self.beta * (1 - c) - 1))
            z.sub_(g, alpha=lr)
        self.k += 1

    def state_dict(self):
        return {"z": [z.clone() for z in self.z], "k": self.k, "weight_sum": self.weight_sum, "training": self.training}

    def load_state_dict(self, s):
        self.z, self.k, self.weight_sum, self.training = [z.clone() for z in s["z"]], s["k"], s["weight_sum"], s["training"]


def make(seed):
    torch.manual_seed(seed)
    return {"model": nn.Linear(5, 2), "batches": [{"x": torch.randn(6, 5), "y": torch.randn(6, 2)} for _ in range(9)], "save_at": 4}


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def right(model, batches, save_at, lr=0.1, beta=0.9, warmup=3):
    opt = ScheduleFreeSGD(model.parameters(), lr, beta, warmup)
    at_save = None
    for k, b in enumerate(batches):
        if k == save_at:
            opt.eval()
            at_save = _flat(model)
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})
            model = copy.deepcopy(model)
            model.load_state_dict(saved["model"])
            opt = ScheduleFreeSGD(model.parameters(), lr, beta, warmup)
            opt.load_state_dict(saved["optimizer"])
        opt.train()
        model.zero_grad(set_to_none=True)
        F.mse_loss(model(b["x"]), b["y"]).backward()
        opt.step()
    opt.eval()
    return at_save, _flat(model)


if __name__ == "__main__":
    i = make(0)
    net = copy.deepcopy(i["model"])
    z = [p.detach().clone() for p in net.parameters()]; x = [p.clone() for p in z]; total, at = 0.0, None
    for k, b in enumerate(i["batches"]):
        if k == i["save_at"]:
            at = torch.cat([v.flatten() for v in x])
        lr = 0.1 * min(1, (k + 1) / 3)
        with torch.no_grad():
            for p, zz, xx in zip(net.parameters(), z, x):
                p.copy_(0.1 * zz + 0.9 * xx)
        g = torch.autograd.grad(F.mse_loss(net(b["x"]), b["y"]), list(net.parameters()))
        total += lr ** 2; c = lr ** 2 / total
        z = [a - lr * d for a, d in zip(z, g)]; x = [(1 - c) * a + c * d for a, d in zip(x, z)]
    a, e = right(**i, **VALUES)
    print("error at the save", float((a - at).abs().max()), "at the end", float((e - torch.cat([v.flatten() for v in x])).abs().max()))

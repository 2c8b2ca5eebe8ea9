"""Checkpoint written while the EMA average sits in the model; resume continues from the average.
atomistic-machine-learning/schnetpack#785, https://github.com/atomistic-machine-learning/schnetpack/pull/785, 2026. Validation
copies the EMA average into the model and the raw weights come back only at the start of the next training epoch; checkpoints are
written in between. On resume the model is loaded with the average, and on_fit_start at once stores "the raw weights" again,
overwriting the raw weights kept in the EMA state, so the later restore does nothing and training goes on from the average."""
import copy
import torch

FAMILY = "schedules, updates, and saved or cached state"
KIND = "state"
INPUTS = {"model": "tiny module, x [rows, 4] -> [rows, 1]", "batches": "list of (x, y) training batches", "val": "(x, y) validation batch"}
SETTINGS = {"lr": "SGD learning rate, 0.1", "decay": "EMA decay, 0.9"}
NOTES = ("broken/right make a trainer from a model: train_epoch(batches), validate(val) -> loss of the EMA weights, state_dict(), "
         "load_state_dict(). A checkpoint is taken right after validate(), as the training framework does. A run that is saved there and loaded "
         "into a fresh trainer (with any initial weights) must continue exactly as the run that was not interrupted: same weights after the next train_epoch.")


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
    return {"model": model, "batches": batches, "val": (torch.randn(8, 4), torch.randn(8, 1))}


class _Trainer:
    def __init__(self, model, lr, decay):
        self.model, self.decay = model, decay
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.collected = []

    def store(self):
        self.collected = [p.detach().clone() for p in self.model.parameters()]

    def copy_to(self):
        for p, s in zip(self.model.parameters(), self.shadow):
            p.data.copy_(s)

    def restore(self):
        for p, c in zip(self.model.parameters(), self.collected):
            p.data.copy_(c)

    def train_epoch(self, batches):
        if self.collected:
            self.restore()
            self.collected = []
        for x, y in batches:
            self.opt.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            self.opt.step()
            for s, p in zip(self.shadow, self.model.parameters()):
                s.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def validate(self, val):
        self.store()
        self.copy_to()
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(self.model(val[0]), val[1]))

    def state_dict(self):
        return copy.deepcopy({"model": self.model.state_dict(), "opt": self.opt.state_dict(), "shadow": self.shadow, "collected": self.collected})

    def _load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.shadow, self.collected = state["shadow"], state["collected"]


class _Broken(_Trainer):
    def load_state_dict(self, state):
        self._load(state)
        self.store()
        self.copy_to()


class _Right(_Trainer):
    def load_state_dict(self, state):
        self._load(state)
        if self.collected:
            self.restore()
            self.store()
            self.copy_to()


def broken(model, lr=0.1, decay=0.9):
    return _Broken(model, lr, decay)


def right(model, lr=0.1, decay=0.9):
    return _Right(model, lr, decay)


def _vec(m):
    return torch.cat([p.detach().flatten() for p in m.parameters()])


if __name__ == "__main__":
    for f in (broken, right):
        c = make(0)
        a = f(c["model"])
        a.train_epoch(c["batches"])
        a.validate(c["val"])
        b = f(make(1)["model"])
        b.load_state_dict(a.state_dict())
        a.train_epoch(c["batches"])
        b.train_epoch(c["batches"])
        d = float((_vec(a.model) - _vec(b.model)).abs().max())
        print(f.__name__, "difference between continued and resumed run", d)
        assert (d > 1e-3) == (f is broken)

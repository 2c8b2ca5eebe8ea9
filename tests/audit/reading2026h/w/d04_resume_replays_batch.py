"""Resume trains the last saved batch a second time. thinking-machines-lab/tinker-cookbook#935 (fix #941), https://github.com/thinking-machines-lab/tinker-cookbook/issues/935, 2026.
The checkpoint is written after the optimizer step of batch N and records batch = N; resume starts at the recorded batch, because it takes the number for the next batch to run.
The saved weights hold batch N already, so it is applied twice after each resume."""
import copy
import torch
import torch.nn as nn

FAMILY = "data stages"
KIND = "state"
INPUTS = {"model": "small regression net", "batches": "list of (x, y) batches of one epoch, in a fixed order"}
SETTINGS = {"lr": "SGD with momentum 0.9, 0.1", "save_every": "steps between two checkpoints, 3"}
NOTES = ("broken/right make a trainer with run(n), state_dict(), load_state_dict(). A run that is stopped and resumed from its last checkpoint must see each batch of each epoch once and end with the weights "
         "of a run that was not stopped. `log` lists the (epoch, batch) of the steps that made the present weights.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
            "batches": [(torch.randn(5, 4, generator=g), torch.randn(5, 1, generator=g)) for _ in range(7)]}


class _Trainer:
    record_next = True

    def __init__(self, model, batches, lr=0.1, save_every=3):
        self.model, self.batches, self.save_every = model, batches, save_every
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.start = (0, 0)          # (epoch, batch) to run next
        self.log, self.saved = [], None

    def state_dict(self):
        return copy.deepcopy({"model": self.model.state_dict(), "opt": self.opt.state_dict(), "loop": self.loop_state, "log": self.log})

    def load_state_dict(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"]); self.opt.load_state_dict(state["opt"])
        self.start, self.log = (state["loop"]["epoch"], state["loop"]["batch"]), state["log"]

    def run(self, epochs, stop_after=None):
        n, done = len(self.batches), 0
        for epoch in range(self.start[0], epochs):
            for batch in range(self.start[1] if epoch == self.start[0] else 0, n):
                x, y = self.batches[batch]
                self.opt.zero_grad(); ((self.model(x) - y) ** 2).mean().backward(); self.opt.step()
                self.log.append((epoch, batch)); done += 1
                self.loop_state = self.position(epoch, batch, n)
                if len(self.log) % self.save_every == 0:
                    self.saved = self.state_dict()
                if done == stop_after:
                    return


class _Broken(_Trainer):
    def position(self, epoch, batch, n):
        return {"epoch": epoch, "batch": batch}


class _Right(_Trainer):
    def position(self, epoch, batch, n):
        return {"epoch": epoch + 1, "batch": 0} if batch + 1 == n else {"epoch": epoch, "batch": batch + 1}


def broken(model, batches, lr=0.1, save_every=3):
    return _Broken(model, batches, lr, save_every)


def right(model, batches, lr=0.1, save_every=3):
    return _Right(model, batches, lr, save_every)


if __name__ == "__main__":
    for f in (broken, right):
        whole = f(**make(0)); whole.run(2)
        first = f(**make(0)); first.run(2, stop_after=8)
        again = f(**make(0)); again.load_state_dict(first.saved); again.run(2)
        diff = max((a - b).abs().max().item() for a, b in zip(whole.model.parameters(), again.model.parameters()))
        print(f.__name__, "steps", len(whole.log), len(again.log), "weight difference", diff)
        assert (diff > 1e-4) == (f is broken)

"""The adaptive learning rate is reset on resume. leggedrobotics/rsl_rl#221, https://github.com/leggedrobotics/rsl_rl/issues/221, 2026.
The KL-adaptive schedule keeps its rate in an attribute and writes it into the optimizer at every update. load() restored the optimizer (with its rate) but
not the attribute, so the first update after a resume overwrote the restored rate with the rate of the config: a sudden jump of the rate and the loss."""
import copy
import torch

FAMILY = "learning-rate and other schedules"
KIND = "state"
INPUTS = {"kls_before": "measured KL of each update before the checkpoint, list of floats", "kls_after": "measured KL of each update after the resume, list of floats"}
SETTINGS = {"lr0": "learning rate of the config, 1e-3", "desired_kl": "target KL, 0.01"}
NOTES = ("A PPO agent with the KL-adaptive rate: before each optimizer step the rate is divided by 1.5 (not below 1e-5) when KL > 2*desired_kl, and multiplied by 1.5 (not above 1e-2) "
         "when 0 < KL < desired_kl/2. The function runs the updates kls_before, saves the agent (state dicts of network and optimizer), makes a new agent from the config, loads the "
         "checkpoint and runs kls_after. It returns the learning rates that the optimizer had in the updates after the resume; they are those of the run that was never interrupted.")


class _Agent:
    def __init__(self, lr0, desired_kl, sync):
        self.net = torch.nn.Linear(2, 1)
        self.learning_rate = lr0
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr0)
        self.desired_kl, self.sync = desired_kl, sync

    def update(self, kl):
        if kl > self.desired_kl * 2.0:
            self.learning_rate = max(1e-5, self.learning_rate / 1.5)
        elif 0.0 < kl < self.desired_kl / 2.0:
            self.learning_rate = min(1e-2, self.learning_rate * 1.5)
        for g in self.optimizer.param_groups:
            g["lr"] = self.learning_rate
        self.optimizer.zero_grad()
        self.net(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        return self.optimizer.param_groups[0]["lr"]

    def save(self):
        return copy.deepcopy({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, d):
        self.net.load_state_dict(d["net"])
        self.optimizer.load_state_dict(d["optimizer"])
        if self.sync:
            self.learning_rate = self.optimizer.param_groups[0]["lr"]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"kls_before": (torch.rand(12, generator=g) * 0.05).tolist(), "kls_after": (torch.rand(5, generator=g) * 0.03).tolist()}


def _run(kls_before, kls_after, lr0, desired_kl, sync):
    a = _Agent(lr0, desired_kl, sync)
    for k in kls_before:
        a.update(k)
    ck = a.save()
    b = _Agent(lr0, desired_kl, sync)
    b.load(ck)
    return [b.update(k) for k in kls_after]


def broken(kls_before, kls_after, lr0=1e-3, desired_kl=0.01):
    return _run(kls_before, kls_after, lr0, desired_kl, sync=False)


def right(kls_before, kls_after, lr0=1e-3, desired_kl=0.01):
    return _run(kls_before, kls_after, lr0, desired_kl, sync=True)


if __name__ == "__main__":
    i = make(0)
    a = _Agent(1e-3, 0.01, True)
    ref = [a.update(k) for k in i["kls_before"] + i["kls_after"]][-5:]
    print("broken", broken(**i)); print("right ", right(**i)); print("uninterrupted", ref)

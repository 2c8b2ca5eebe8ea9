"""IQL's second target is the online twin head. ray-project/ray#64931, https://github.com/ray-project/ray/issues/64931,
2026. For the target prediction of the twin critic the module passed the trainable qf_twin instead of the frozen
target_qf_twin. The value loss then sent gradients into the online twin critic, and the target moved with it: the twin's
loss diverged while the first critic trained normally."""
import copy
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"obs": "states [rows, 6]", "actions": "actions [rows, 2]", "rewards": "[rows]", "next_obs": "next states [rows, 6]",
          "terminated": "1 where the episode really ended [rows]"}
SETTINGS = {"gamma": "discount, 0.99", "expectile": "expectile of the value loss, 0.8"}
NOTES = ("Implicit Q-learning: sum of two critic losses (mean over rows) and the expectile value loss (mean over rows). "
         "The target networks are frozen copies (requires_grad False), constants of this loss. The value of the next "
         "state in the critics' target is a constant. Every other parameter of the model gets a gradient.")


def mlp(i):
    return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Linear(16, 1))


class IQLModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_q, self.encoder_twin = nn.Linear(8, 12), nn.Linear(8, 12)
        self.qf, self.qf_twin = mlp(12), mlp(12)
        self.vf = mlp(6)
        for head in (self.qf, self.qf_twin):            # critics of comparable size, neither always the smaller one
            nn.init.normal_(head[2].weight, std=1.0)
            nn.init.zeros_(head[2].bias)
        self.target_encoder_q, self.target_encoder_twin = copy.deepcopy(self.encoder_q), copy.deepcopy(self.encoder_twin)
        self.target_qf, self.target_qf_twin = copy.deepcopy(self.qf), copy.deepcopy(self.qf_twin)
        for m in (self.target_encoder_q, self.target_encoder_twin, self.target_qf, self.target_qf_twin):
            for p in m.parameters():
                p.requires_grad_(False)
                p.add_(0.1 * torch.randn_like(p))       # the targets trail the online networks

    @staticmethod
    def q(x, encoder, head):
        return head(torch.tanh(encoder(x))).squeeze(-1)


def make(seed):
    torch.manual_seed(seed)
    n = 24
    return {"model": IQLModel(),
            "batch": {"obs": torch.randn(n, 6), "actions": torch.randn(n, 2), "rewards": torch.randn(n),
                      "next_obs": torch.randn(n, 6), "terminated": (torch.rand(n) < 0.2).float()}}


def losses(model, batch, target_q, gamma, expectile):
    x = torch.cat([batch["obs"], batch["actions"]], -1)
    v = model.vf(batch["obs"]).squeeze(-1)
    diff = target_q - v
    weight = torch.where(diff > 0, expectile, 1 - expectile)
    value_loss = (weight * diff ** 2).mean()
    with torch.no_grad():
        y = batch["rewards"] + gamma * (1 - batch["terminated"]) * model.vf(batch["next_obs"]).squeeze(-1)
    q_loss = F.mse_loss(model.q(x, model.encoder_q, model.qf), y)
    twin_loss = F.mse_loss(model.q(x, model.encoder_twin, model.qf_twin), y)
    return value_loss + q_loss + twin_loss, {"value": value_loss.item(), "q": q_loss.item(), "twin": twin_loss.item()}


def broken(model, batch, gamma=0.99, expectile=0.8):
    x = torch.cat([batch["obs"], batch["actions"]], -1)
    target_q = torch.minimum(model.q(x, model.target_encoder_q, model.target_qf),
                             model.q(x, model.target_encoder_twin, model.qf_twin))
    return losses(model, batch, target_q, gamma, expectile)


def right(model, batch, gamma=0.99, expectile=0.8):
    x = torch.cat([batch["obs"], batch["actions"]], -1)
    target_q = torch.minimum(model.q(x, model.target_encoder_q, model.target_qf),
                             model.q(x, model.target_encoder_twin, model.target_qf_twin))
    return losses(model, batch, target_q, gamma, expectile)


if __name__ == "__main__":
    grads = []
    for f in (broken, right):
        d = make(0)
        loss, metrics = f(**d)
        loss.backward()
        grads.append(d["model"].qf_twin[2].weight.grad.clone())
        print(f.__name__, loss.item(), metrics, "gradient of qf_twin", grads[-1].norm().item())
    assert (grads[0] - grads[1]).abs().max() > 1e-4

"""Padded action steps stay in the denominator. huggingface/lerobot#3377, https://github.com/huggingface/lerobot/pull/3377, 2026.
Action chunks that reach over the end of an episode are padded. The policies (ACT, diffusion, multi-task DiT) set the loss of padded steps to zero and then take the
mean over all steps, so loss and gradient of a batch shrink with its share of padding (reported as #3353, merged as #3442)."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "multimodal supervised loss"
KIND = "loss"
INPUTS = {"image": "image features, [rows, 10]", "state": "robot state, [rows, 4]", "actions": "chunk of true actions, [rows, horizon, action size]", "action_is_pad": "True where the step lies behind the end of the episode, [rows, horizon]",
          "noise": "the Gaussian noise that is added, as actions", "alpha_bar": "share of signal at the sampled diffusion step, in (0,1), [rows]"}
SETTINGS = {}
NOTES = ("Diffusion policy loss: the model sees sqrt(a)*actions + sqrt(1-a)*noise, the image features, the state and a = alpha_bar, and predicts the noise. The loss is the mean squared error over all numbers of the valid steps: "
         "the sum over steps with action_is_pad False and over the action size, of all rows, divided by (number of valid steps of all rows times the action size). Padded steps have no influence on value or gradient of the mean. Noise and diffusion step come with the batch. All parameters are used.")

class Policy(nn.Module):
    def __init__(self, horizon=8, act=3, width=32):
        super().__init__()
        self.cond = nn.Linear(10 + 4 + 1, width)
        self.step = nn.Linear(act, width)
        self.pos = nn.Parameter(torch.randn(horizon, width) * 0.1)
        self.out = nn.Linear(width, act)
    def forward(self, noisy, image, state, a):
        c = self.cond(torch.cat([image, state, a[:, None]], -1))
        return self.out(torch.tanh(self.step(noisy) + self.pos + c[:, None]))

def make(seed):
    torch.manual_seed(seed)
    n, H, A = 6, 8, 3
    pad = torch.arange(H) >= torch.tensor([8, 3, 8, 5, 2, 7])[:, None]
    return {"image": torch.randn(n, 10), "state": torch.randn(n, 4), "actions": torch.randn(n, H, A), "action_is_pad": pad,
            "noise": torch.randn(n, H, A), "alpha_bar": torch.rand(n) * 0.9 + 0.05, "model": Policy()}

def _err(model, b):
    a = b["alpha_bar"][:, None, None]
    noisy = a.sqrt() * b["actions"] + (1 - a).sqrt() * b["noise"]
    return F.mse_loss(model(noisy, b["image"], b["state"], b["alpha_bar"]), b["noise"], reduction="none")

def broken(model, batch):
    loss = _err(model, batch)
    in_episode = ~batch["action_is_pad"]
    loss = loss * in_episode.unsqueeze(-1)
    return loss.mean()

def right(model, batch):
    loss = _err(model, batch)
    in_episode = (~batch["action_is_pad"]).unsqueeze(-1)
    return (loss * in_episode).sum() / (in_episode.sum() * loss.shape[-1]).clamp_min(1)

if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    b, r, s = broken(m, d), right(m, d), _err(m, d)[~d["action_is_pad"]].mean()
    print("broken", b.item(), "right", r.item(), "only valid steps", s.item()); assert abs(r - s) < 1e-6 and abs(b - s) > 1e-2

"""Timestep weighting not split for prior preservation. huggingface/diffusers#13743, https://github.com/huggingface/diffusers/pull/13743, 2026.
The Flux and SD3 DreamBooth LoRA scripts split model_pred and target in an instance half and a prior half,
but left the per-sample weighting at the size of the whole batch. With train_batch_size 1 the weighting of two samples
broadcasts against one sample: both loss terms get the mean of the two weights instead of their own weight."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"latents": "clean latents, [2, tokens, channels]: row 0 the instance image, row 1 the prior (class) image",
          "noise": "gaussian noise, same shape", "sigmas": "noise level of each row in (0,1), [2]"}
SETTINGS = {"prior_weight": "weight of the prior term, 1.0"}
NOTES = ("Flow matching, target noise - latents; sigma_sqrt weighting (sigma to the power -2) per row; mean over the entries of each "
         "row, mean over rows, the instance term plus prior_weight times the prior term. Rows come as instance half then prior half; "
         "here exactly one of each (train_batch_size 1). All inputs are constants; every parameter is used.")
import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, channels=6, width=16):
        super().__init__()
        self.inp = nn.Linear(channels + 1, width)
        self.out = nn.Linear(width, channels)

    def forward(self, x, sigma):
        s = sigma.view(-1, 1, 1).expand(*x.shape[:2], 1)
        return self.out(torch.tanh(self.inp(torch.cat([x, s], -1))))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Denoiser(), "latents": torch.randn(2, 5, 6, generator=g), "noise": torch.randn(2, 5, 6, generator=g),
            "sigmas": torch.rand(2, generator=g) * 0.8 + 0.1}


def broken(model, batch, prior_weight=1.0):
    sigmas = batch["sigmas"].view(-1, 1, 1)
    noisy = (1 - sigmas) * batch["latents"] + sigmas * batch["noise"]
    pred = model(noisy, batch["sigmas"])
    target = batch["noise"] - batch["latents"]
    weighting = sigmas ** -2.0
    pred, pred_prior = torch.chunk(pred, 2, dim=0)
    target, target_prior = torch.chunk(target, 2, dim=0)
    prior = torch.mean((weighting * (pred_prior - target_prior) ** 2).reshape(target_prior.shape[0], -1), 1).mean()
    loss = torch.mean((weighting * (pred - target) ** 2).reshape(target.shape[0], -1), 1).mean()
    return loss + prior_weight * prior


def right(model, batch, prior_weight=1.0):
    sigmas = batch["sigmas"].view(-1, 1, 1)
    noisy = (1 - sigmas) * batch["latents"] + sigmas * batch["noise"]
    pred = model(noisy, batch["sigmas"])
    target = batch["noise"] - batch["latents"]
    weighting = sigmas ** -2.0
    pred, pred_prior = torch.chunk(pred, 2, dim=0)
    target, target_prior = torch.chunk(target, 2, dim=0)
    weighting, weighting_prior = torch.chunk(weighting, 2, dim=0)
    prior = torch.mean((weighting_prior * (pred_prior - target_prior) ** 2).reshape(target_prior.shape[0], -1), 1).mean()
    loss = torch.mean((weighting * (pred - target) ** 2).reshape(target.shape[0], -1), 1).mean()
    return loss + prior_weight * prior


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    b, r = broken(m, d), right(m, d)
    print("broken", b.item(), "right", r.item())
    assert abs(b - r) > 1e-3

"""normalize_advantages_dict computes the mean over padding. NovaSky-AI/SkyRL#1305,
https://github.com/NovaSky-AI/SkyRL/issues/1305, 2026. The batch normalisation of token advantages takes the mean over all
entries of the tensor, padding included, while the variance is masked. With rows of different length the normalised advantages
no longer have mean 0 over the response tokens."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {
    "rewards": "outcome reward of each row, [rows]",
    "groups": "prompt number of each row, [rows]",
    "response_mask": "1 on response tokens, 0 on padding, [rows, time]; rows differ in length",
}
SETTINGS = {"eps": "floor of the variance, 1e-8"}
NOTES = ("REINFORCE++ with group baseline. First the mean reward of the prompt's rows is subtracted from each row's reward (no division), and the result is given to every response token of the row. "
         "Then the token advantages are normalised over the whole batch: mean and (population) variance over all response tokens of all rows, each token counting once; advantage = (a - mean) / sqrt(max(var, eps)). "
         "After it the response tokens have mean 0 and variance 1. Padding is 0 in the result. Constant, [rows, time].")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(2, 13, (8,), generator=g)
    return {"rewards": torch.rand(8, generator=g).round(decimals=2), "groups": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
            "response_mask": (torch.arange(12)[None] < lens[:, None]).float()}


def _token(rewards, groups, mask):
    base = torch.stack([rewards[groups == g].mean() for g in groups])
    return (rewards - base)[:, None] * mask


def broken(rewards, groups, response_mask, eps=1e-8):
    a = _token(rewards, groups, response_mask)
    mean = a.mean()
    var = ((a - mean).pow(2) * response_mask).sum() / response_mask.sum()
    return (a - mean) * var.clamp(min=eps).rsqrt() * response_mask


def right(rewards, groups, response_mask, eps=1e-8):
    a = _token(rewards, groups, response_mask)
    mean = (a * response_mask).sum() / response_mask.sum()
    var = ((a - mean).pow(2) * response_mask).sum() / response_mask.sum()
    return (a - mean) * var.clamp(min=eps).rsqrt() * response_mask


if __name__ == "__main__":
    m = make(0)
    a, b = broken(**m), right(**m)
    n = m["response_mask"].sum()
    print("mean over response tokens, broken", (a.sum() / n).item(), "right", (b.sum() / n).item())
    assert abs(b.sum() / n) < 1e-6 and (a - b).abs().max() > 1e-2

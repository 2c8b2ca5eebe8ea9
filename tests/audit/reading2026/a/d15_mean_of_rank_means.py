"""Token metrics as a mean of per-rank means. huggingface/trl#6380, https://github.com/huggingface/trl/pull/6380, 2026.
kl, entropy and clip ratios were averaged over the tokens of each rank and then over ranks. Ranks with few completion
tokens weigh as much as ranks with many, so the logged value is biased whenever the token counts differ. Logging only."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list with one dict per rank: 'kl' per-token value [rows, time], 'mask' 1 on completion tokens [rows, time]"}
SETTINGS = {}
NOTES = "Mean of the per-token KL over the completion tokens of all ranks."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for rank in range(4):
        lengths = torch.randint(2, 5 + 6 * rank, (3,), generator=g)
        mask = (torch.arange(24)[None] < lengths[:, None]).float()
        out.append({"kl": torch.rand(3, 24, generator=g) * (1 + rank), "mask": mask})
    return {"per_rank": out}

def broken(per_rank):
    means = [(r["kl"] * r["mask"]).sum() / r["mask"].sum().clamp(min=1) for r in per_rank]
    return torch.stack(means).nanmean().item()          # gather, then mean

def right(per_rank):
    total = torch.stack([(r["kl"] * r["mask"]).sum() for r in per_rank]).sum()
    count = torch.stack([r["mask"].sum() for r in per_rank]).sum()
    return (total / count.clamp(min=1)).item()

def single(per_rank):
    kl, mask = torch.cat([r["kl"] for r in per_rank]), torch.cat([r["mask"] for r in per_rank])
    return kl[mask.bool()].mean().item()

if __name__ == "__main__":
    d = make(0)
    print(broken(**d), right(**d), "one process:", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-5 and abs(broken(**d) - single(**d)) > 1e-2

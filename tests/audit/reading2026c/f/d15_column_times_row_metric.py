"""The sequence importance-ratio metric multiplies a column by a row. NVIDIA-NeMo/RL#3753, https://github.com/NVIDIA-NeMo/RL/pull/3753, 2026.
The sequence weights have shape [B, 1] so that they apply to all tokens; the metric multiplies them by the sample mask [B], which gives [B, B], sums it all and divides by the number of
valid samples. The metric is about B times too large and weighs masked samples in. The loss is not affected."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank {log_ratio: current minus sampler logprob, [rows, time]; mask: 1 on completion tokens, [rows, time]; sample_mask: 1 on valid rows, [rows]}"}
SETTINGS = {}
NOTES = "Mean over the valid rows of all ranks of the row's geometric-mean importance ratio; ranks may hold different numbers of rows; every row has a completion token."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for rows in (4, 3):
        mask = (torch.arange(8)[None] < torch.randint(3, 9, (rows, 1), generator=g)).float()
        sample = torch.ones(rows)
        sample[-1] = 0
        ranks.append({"log_ratio": 0.3 * torch.randn(rows, 8, generator=g), "mask": mask, "sample_mask": sample})
    return {"ranks": ranks}

def weights(rank):  # [rows, 1], ready to be applied to the tokens
    return ((rank["log_ratio"] * rank["mask"]).sum(-1, keepdim=True) / rank["mask"].sum(-1, keepdim=True)).exp()

def broken(ranks):
    top = sum((weights(r) * r["sample_mask"]).sum() for r in ranks)
    return float(top / sum(r["sample_mask"].sum() for r in ranks))

def right(ranks):
    top = sum((weights(r).squeeze(-1) * r["sample_mask"]).sum() for r in ranks)
    return float(top / sum(r["sample_mask"].sum() for r in ranks))

def twin(ranks):
    """Single process: all rows in one list."""
    values = []
    for r in ranks:
        for log_ratio, mask, valid in zip(r["log_ratio"], r["mask"], r["sample_mask"]):
            if valid:
                values.append(float(log_ratio[mask > 0].mean().exp()))
    return sum(values) / len(values)

if __name__ == "__main__":
    made = make(0)
    print("broken", broken(**made), "right", right(**made), "single process", twin(**made))
    assert abs(right(**made) - twin(**made)) < 1e-5 and broken(**made) > 2

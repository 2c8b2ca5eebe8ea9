"""SFT entropy averaged over the wrong positions. huggingface/trl#5620, https://github.com/huggingface/trl/pull/5620, 2026.
The entropy metric was not shifted like the loss and was weighted by the attention mask instead of by the labels. So it
covered prompt tokens that are not trained, and every position was off by one against the prediction that is trained."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list with one dict per rank: 'logits' [rows, time, vocabulary], 'labels' [rows, time] with -100 on prompt "
                      "and padding, not shifted, 'attention_mask' [rows, time]"}
SETTINGS = {}
NOTES = "Mean entropy of the next-token distribution over the positions that the loss trains, all ranks together."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for rank in range(2):
        lengths, prompts = torch.randint(8, 15, (3,), generator=g), torch.randint(2, 7, (3,), generator=g)
        t = torch.arange(14)[None]
        attention_mask = (t < lengths[:, None]).long()
        labels = torch.randint(0, 20, (3, 14), generator=g)
        labels[(t < prompts[:, None]) | (attention_mask == 0)] = -100
        sharp = torch.where(t < prompts[:, None], 0.5, 3.0)[..., None]       # the model is unsure inside prompts
        out.append({"logits": torch.randn(3, 14, 20, generator=g) * sharp, "labels": labels, "attention_mask": attention_mask})
    return {"per_rank": out}

def entropy(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)

def broken(per_rank):
    total = torch.stack([(entropy(r["logits"]) * r["attention_mask"]).sum() for r in per_rank]).sum()
    return (total / torch.stack([r["attention_mask"].sum() for r in per_rank]).sum()).item()

def right(per_rank):
    total, count = 0.0, 0
    for r in per_rank:
        mask = (r["labels"][:, 1:] != -100).float()
        total, count = total + (entropy(r["logits"][:, :-1]) * mask).sum(), count + mask.sum()
    return (total / count).item()

def single(per_rank):
    logits, labels = torch.cat([r["logits"] for r in per_rank]), torch.cat([r["labels"] for r in per_rank])
    return entropy(logits[:, :-1])[labels[:, 1:] != -100].mean().item()

if __name__ == "__main__":
    d = make(0)
    print(broken(**d), right(**d), "one process:", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-5 and abs(broken(**d) - single(**d)) > 1e-2

"""Reward-model loss on every position from where the two answers part. DeepSpeed-Chat (reward_model.py) and trlx. The model
gives a value at every token; the pairwise loss is the mean of -log sigmoid(chosen - rejected) over all positions from the
first token at which the two sequences differ to the end of the longer one - position by position, though the tokens there
are unrelated - and not only at the last token. Padding of the shorter answer is read, too."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "reward models"
KIND = "loss"
INPUTS = {"chosen_ids": "prompt and chosen answer, right padded with 0, [pairs, time]",
          "rejected_ids": "prompt and rejected answer, right padded with 0, [pairs, time]"}
SETTINGS = {}
NOTES = ("Pairwise Bradley-Terry loss per position: for each pair the mean over positions d .. e-1 of -logsigmoid(chosen value - "
         "rejected value), d = first position where the sequences differ, e = length of the longer of the two without padding. "
         "Mean over pairs. The padding of the shorter sequence up to e takes part (token 0 is an ordinary embedding), on "
         "purpose. All parameters are used. Token 0 occurs only as padding; the two sequences of a pair differ.")


class RewardModel(nn.Module):
    def __init__(self, vocabulary=24, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.value = nn.Linear(width, 1, bias=False)

    def forward(self, ids):
        return self.value(self.cell(self.embed(ids))[0]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    pairs, time, prompt = 4, 12, 3
    at = torch.arange(time).expand(pairs, time)
    out = {"model": RewardModel()}
    start = torch.randint(1, 24, (pairs, prompt), generator=g)
    for name in ("chosen_ids", "rejected_ids"):
        ids = torch.randint(1, 24, (pairs, time), generator=g)
        ids[:, :prompt] = start
        out[name] = ids.masked_fill(at >= torch.randint(prompt + 2, time + 1, (pairs, 1), generator=g), 0)
    return out


def right(model, batch):
    chosen, rejected = batch["chosen_ids"], batch["rejected_ids"]
    chosen_values, rejected_values = model(torch.cat([chosen, rejected])).chunk(2)
    loss = 0.0
    for i in range(len(chosen)):
        first = int((chosen[i] != rejected[i]).nonzero()[0])
        end = max(int((chosen[i] != 0).sum()), int((rejected[i] != 0).sum()))
        loss = loss - F.logsigmoid(chosen_values[i, first:end] - rejected_values[i, first:end]).mean()
    return loss / len(chosen)


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()
    slow = 0.0
    for c, r in zip(batch["chosen_ids"], batch["rejected_ids"]):
        vc, vr = model(c[None])[0], model(r[None])[0]
        used = [t for t in range(12) if any(c[s] != r[s] for s in range(t + 1)) and (any(c[t:] != 0) or any(r[t:] != 0))]
        slow += sum(-torch.sigmoid(vc[t] - vr[t]).log().item() for t in used) / len(used) / 4
    print(loss.item(), slow, "gradient", model.value.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-5 and model.value.weight.grad.norm() > 0

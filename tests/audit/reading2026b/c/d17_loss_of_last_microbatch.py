"""Reported training loss is that of the last micro-batch. karpathy/autoresearch#357, https://github.com/karpathy/autoresearch/pull/357, 2026.
In the loop over micro-steps the logged loss was assigned (train_loss = loss.detach()) instead of accumulated. The smoothed training loss that is
reported and used to judge a run was the loss of the final micro-batch only, not the mean over the global batch that the optimizer step used."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "the micro-batches of one optimizer step in order (micro-batches instead of ranks): a tensor with the loss of each token, all of the same size"}
SETTINGS = {}
NOTES = "Mean loss of the global batch of one optimizer step, over all micro-batches of equal size; the number that belongs to the gradient. The single-process twin is `single`."


def make(seed):
    torch.manual_seed(seed)
    return {"per_rank": [1.5 + torch.rand(2, 8) * (i + 1) for i in range(4)]}


def broken(per_rank):
    train_loss = torch.zeros(())
    for tokens in per_rank:
        loss = tokens.mean()
        train_loss = loss.detach()
        loss = loss / len(per_rank)          # loss.backward() follows
    return train_loss.item()


def right(per_rank):
    train_loss = torch.zeros(())
    for tokens in per_rank:
        loss = tokens.mean()
        train_loss += loss.detach() / len(per_rank)
        loss = loss / len(per_rank)          # loss.backward() follows
    return train_loss.item()


def single(per_rank):
    return torch.cat(per_rank).mean().item()


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "one batch", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-5 and abs(broken(**d) - single(**d)) > 1e-2

"""Model left in eval mode after the first evaluation. sgl-project/SpecForge#563, https://github.com/sgl-project/SpecForge/pull/563, 2026.
train_eagle3.py called draft_model.eval() at the start of its evaluation loop and never went back to train mode. All steps after the
first evaluation ran without dropout. (The pull request fixes nine defects; this is one of them.)"""
FAMILY = "metrics"
KIND = "update"
INPUTS = {"model": "a small classifier with dropout", "optimizer": "SGD over all its parameters",
          "batches": "list of training batches, each x [rows, features] and y [rows]", "eval_batches": "list of held-out batches of the same form"}
SETTINGS = {"eval_interval": "evaluate after every 2 optimizer steps"}
NOTES = ("One optimizer step per batch, mean cross entropy over the rows, dropout 0.5 active in every training step; evaluation without dropout and without gradient. "
         "The last step may be followed by an evaluation. Returns the evaluation losses. Seed torch before the call: dropout draws from the global generator.")
import torch
import torch.nn.functional as F
from torch import nn


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 5))
    batch = lambda: {"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,))}
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3), "batches": [batch() for _ in range(6)],
            "eval_batches": [batch() for _ in range(2)]}


def broken(model, optimizer, batches, eval_batches, eval_interval=2):
    model.train()
    history = []
    for step, batch in enumerate(batches, 1):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % eval_interval == 0:
            model.eval()
            with torch.no_grad():
                history.append(sum(F.cross_entropy(model(b["x"]), b["y"]).item() for b in eval_batches) / len(eval_batches))
    return history


def right(model, optimizer, batches, eval_batches, eval_interval=2):
    model.train()
    history = []
    for step, batch in enumerate(batches, 1):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % eval_interval == 0:
            model.eval()
            with torch.no_grad():
                history.append(sum(F.cross_entropy(model(b["x"]), b["y"]).item() for b in eval_batches) / len(eval_batches))
            model.train()
    return history


if __name__ == "__main__":
    out = []
    for f in (broken, right):
        d = make(0)
        torch.manual_seed(1)
        out.append((f(**d), d["model"].training))
    print("broken", out[0], "right", out[1])
    assert out[0][0][0] == out[1][0][0] and out[0][0][1] != out[1][0][1] and not out[0][1] and out[1][1]

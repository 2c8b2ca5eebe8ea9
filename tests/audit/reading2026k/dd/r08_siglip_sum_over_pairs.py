"""SigLIP (Zhai et al. 2023, arXiv:2303.15343; open_clip SigLipLoss, big_vision). Sigmoid loss on every pair of the batch: all
rows x rows pairs are binary problems, label +1 on the diagonal and -1 elsewhere, and the sum is divided by the number of
ROWS, not by the number of pairs. The temperature is learned as its logarithm and the bias starts at -10, so at the start the
loss is dominated by the positives."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "embeddings"
KIND = "loss"
INPUTS = {"image": "image features, [rows, features]", "text": "token ids of the caption of the same row, [rows, time]"}
SETTINGS = {}
NOTES = ("Sigmoid contrastive loss: logits = exp(log temperature) * cosine + bias; loss = sum over all row-column pairs of "
         "-logsigmoid(label * logit), label 1 for the pair of the same row and -1 otherwise, divided by the number of rows (so it "
         "grows with the batch). Rows are coupled on purpose: every other row is a negative. Log temperature and bias are "
         "trained parameters of the model; all parameters are used. The order of the rows does not matter.")


class TwoTowers(nn.Module):
    def __init__(self, features=6, vocabulary=24, width=12):
        super().__init__()
        self.see = nn.Linear(features, width)
        self.read = nn.Embedding(vocabulary, width)
        self.log_temperature = nn.Parameter(torch.tensor(10.0).log())
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, image, text):
        return F.normalize(self.see(image), dim=-1), F.normalize(self.read(text).mean(1), dim=-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TwoTowers(), "image": torch.randn(5, 6, generator=g), "text": torch.randint(0, 24, (5, 4), generator=g)}


def right(model, batch):
    image, text = model(batch["image"], batch["text"])
    logits = model.log_temperature.exp() * image @ text.T + model.bias
    labels = 2 * torch.eye(len(logits)) - 1
    return -F.logsigmoid(labels * logits).sum() / len(logits)


if __name__ == "__main__":
    import math
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()
    image, text = model(batch["image"], batch["text"])
    slow = sum(math.log1p(math.exp(-(1 if i == j else -1) * (10 * (image[i] @ text[j]).item() - 10))) for i in range(5) for j in range(5)) / 5
    print(loss.item(), slow, "gradient of the bias", model.bias.grad.item())
    assert abs(loss.item() - slow) < 1e-4 and all(p.grad.abs().sum() > 0 for p in model.parameters())

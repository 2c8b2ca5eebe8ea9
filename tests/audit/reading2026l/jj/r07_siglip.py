"""SigLIP (Zhai et al. 2023, arXiv 2303.15343): every image/text pair of the batch is its own binary problem; the sum over n*n pairs is divided by n only, with a learnable bias that starts at -10."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "multimodal pre-training loss"
KIND = "loss"
INPUTS = {"image": "image features, [n, 12]", "ids": "caption token ids, [n, time]"}
SETTINGS = {}
NOTES = ("Sigmoid contrastive loss. x, y are the L2-normalised embeddings of images and captions, logit_ij = exp(log_t) * x_i.y_j + bias. Label +1 for i = j, -1 for all others. Loss = -(1/n) * sum over all n*n pairs of log sigmoid(label * logit): divided by n, not by n*n. "
         "log_t starts at log 10 and bias at -10; both are trained. There is no softmax over the batch. Captions have no padding. All parameters are used.")

class TwoTower(nn.Module):
    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.img, self.emb = nn.Linear(12, width), nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.log_t, self.bias = nn.Parameter(torch.tensor(10.0).log()), nn.Parameter(torch.tensor(-10.0))
    def forward(self, image, ids):
        return F.normalize(self.img(image), dim=-1), F.normalize(self.rnn(self.emb(ids))[0][:, -1], dim=-1)

def make(seed):
    torch.manual_seed(seed)
    return {"image": torch.randn(6, 12), "ids": torch.randint(0, 29, (6, 7)), "model": TwoTower()}

def right(model, batch):
    x, y = model(batch["image"], batch["ids"])
    logits = model.log_t.exp() * x @ y.T + model.bias
    labels = 2 * torch.eye(len(x)) - 1
    return -F.logsigmoid(labels * logits).sum() / len(x)

if __name__ == "__main__":
    import math
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    x, y = (v.detach() for v in m(d["image"], d["ids"])); s = 0.0
    for i in range(6):
        for j in range(6):
            z = 10 * float(x[i] @ y[j]) - 10
            s += math.log(1 + math.exp(-z if i == j else z))
    print(l.item(), s / 6, [n for n, p in m.named_parameters() if p.grad is None]); assert abs(l.item() - s / 6) < 1e-4

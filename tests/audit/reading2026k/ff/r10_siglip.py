"""SigLIP: all rows x rows pairs, but divided by the number of rows only. Sigmoid Loss for Language Image Pre-Training (Zhai et al., 2023,
arXiv:2303.15343), open_clip SigLipLoss, transformers SiglipModel: a binary loss on each image-text pair, summed over all pairs and divided
by rows, not rows^2; the temperature is a learned logarithm and the bias starts at -10, so that the first loss is small despite random
features. The loss of a batch is not the mean of the losses of its halves."""
import torch
import torch.nn.functional as F

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "loss"
INPUTS = {"images": "image features, [rows, 8] floats", "ids": "token ids of the caption that belongs to the image, [rows, time], right padded", "text_mask": "1 on real tokens, [rows, time]"}
SETTINGS = {}
NOTES = ("-sum over all pairs (i, j) of log sigmoid(z_ij * (exp(log_t) * cos(image_i, text_j) + bias)), z = 1 for i = j and -1 otherwise, divided by the number of rows. "
         "Every row is a negative for every other row, so the loss depends on which rows are together in a batch; the order of the rows does not matter. All parameters (also log_t and bias) are used. "
         "Captions are the mean of their real tokens' embeddings.")


class Pair(torch.nn.Module):
    def __init__(self, v=40, d=16):
        super().__init__()
        self.img = torch.nn.Linear(8, d)
        self.emb = torch.nn.Embedding(v, d)
        self.txt = torch.nn.Linear(d, d)
        self.log_t = torch.nn.Parameter(torch.tensor(10.0).log())
        self.bias = torch.nn.Parameter(torch.tensor(-10.0))

    def forward(self, images, ids, mask):
        x = self.img(images)
        y = self.txt((self.emb(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return F.normalize(x, dim=-1), F.normalize(y, dim=-1)


def make(seed):
    torch.manual_seed(seed)
    mask = torch.ones(6, 7)
    for i, n in enumerate([7, 4, 5, 7, 3, 6]):
        mask[i, n:] = 0
    ids = torch.randint(1, 40, (6, 7)) * mask.long()
    return {"model": Pair(), "images": torch.randn(6, 8), "ids": ids, "text_mask": mask}


def right(model, batch):
    x, y = model(batch["images"], batch["ids"], batch["text_mask"])
    logits = model.log_t.exp() * x @ y.T + model.bias
    z = 2 * torch.eye(len(x)) - 1
    return -F.logsigmoid(z * logits).sum() / len(x)


if __name__ == "__main__":
    import math
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    loss.backward()
    x, y = m(c["images"], c["ids"], c["text_mask"])
    want = 0.0
    for i in range(6):
        for j in range(6):
            s = math.exp(m.log_t.item()) * sum(float(a) * float(b) for a, b in zip(x[i].detach(), y[j].detach())) + m.bias.item()
            want += math.log1p(math.exp(-s if i == j else s))
    print(loss.item(), want / 6, m.log_t.grad.item(), m.bias.grad.item())
    assert abs(loss.item() - want / 6) < 1e-4 and all(p.grad.norm() > 0 for p in m.parameters())

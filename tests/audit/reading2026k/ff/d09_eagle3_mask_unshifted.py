"""EAGLE-3 shifts ids and targets left, but not the loss mask. sgl-project/SpecForge#885,
https://github.com/sgl-project/SpecForge/issues/885, 2026. Target preprocessing shifts the draft's input ids and the teacher's
outputs by one, the loss mask stays where it was. The draft is not trained at the position before the answer, which serving uses in
the first round, and is trained at one position behind the right end of the answer instead; the count of trained rows does not change."""
import torch

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is part of the assistant's answer, [rows, time]", "aux": "hidden states of the frozen target model at each token, [rows, time, width], constant",
          "target_logits": "logits of the frozen target model at each token (its prediction of the next token), [rows, time, vocab], constant"}
SETTINGS = {}
NOTES = ("EAGLE-3 draft, one step: at position p the draft sees aux[p] and the embedding of token p+1, and is distilled on softmax(target_logits[p+1]) (the target's prediction of token p+2). "
         "A position is trained when the token that it consumes, p+1, is part of the answer, so the first trained p is the last prompt position. Mean over trained positions of all rows. "
         "The shifted-out last column is filled with zeros and not trained. Soft cross entropy; all parameters of the draft are used.")


class Draft(torch.nn.Module):
    def __init__(self, v=27, d=12):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.fc = torch.nn.Linear(2 * d, d)
        self.out = torch.nn.Linear(d, v, bias=False)

    def forward(self, ids, aux):
        return self.out(torch.tanh(self.fc(torch.cat([self.emb(ids), aux], -1))))


def make(seed):
    torch.manual_seed(seed)
    mask = torch.zeros(3, 11)
    mask[0, 4:9] = 1
    mask[1, 3:6] = 1
    mask[2, 6:10] = 1
    return {"model": Draft(), "ids": torch.randint(0, 27, (3, 11)), "loss_mask": mask, "aux": torch.randn(3, 11, 12), "target_logits": 2 * torch.randn(3, 11, 27)}


def _left(x):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def broken(model, batch):
    ids, target, mask = _left(batch["ids"]), _left(batch["target_logits"]), batch["loss_mask"]
    logp = torch.log_softmax(model(ids, batch["aux"]), -1)
    ce = -(torch.softmax(target, -1) * logp).sum(-1)
    return (ce * mask).sum() / mask.sum()


def right(model, batch):
    ids, target, mask = _left(batch["ids"]), _left(batch["target_logits"]), _left(batch["loss_mask"])
    logp = torch.log_softmax(model(ids, batch["aux"]), -1)
    ce = -(torch.softmax(target, -1) * logp).sum(-1)
    return (ce * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    aux = c["aux"].clone().requires_grad_()
    for f in (broken, right):
        l = f(m, dict(c, aux=aux))
        g = torch.autograd.grad(l, aux)[0].abs().sum(-1)[0]
        print(f.__name__, float(l), "trained positions of row 0:", g.nonzero().flatten().tolist())
        assert g.nonzero().flatten().tolist() == ([4, 5, 6, 7, 8] if f is broken else [3, 4, 5, 6, 7])

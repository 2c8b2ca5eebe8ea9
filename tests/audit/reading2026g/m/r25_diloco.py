"""DiLoCo: workers run H local AdamW steps without any exchange and drift apart; then old minus mean-of-new parameters is put into .grad as a pseudo-gradient for an outer Nesterov-SGD with lr 0.7 (Douillard et al.). No backward pass fills the outer gradient, workers are reset in place so that their Adam moments live on over the rounds."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "list of rounds; a round is a list over workers; a worker has a list of H dicts with ids [rows, time]", "optimizer": "the outer optimizer, SGD with Nesterov momentum 0.9, lr 0.7, over the model's parameters"}
SETTINGS = {"inner_lr": "AdamW rate of the workers, 1e-2"}
NOTES = "All rounds have the same number of workers. Workers weigh equally in the mean. The inner optimizers are made at the start of a call and live through its rounds. No gradient clipping. Communication once per round. After the call the model's gradients are None. With one worker and an outer SGD(lr=1) without momentum it is plain AdamW up to rounding."
import copy
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    data = torch.randint(0, 32, (4, 8), generator=g)
    batches = [[[{"ids": data[torch.randint(0, 4, (2,), generator=g)]} for _ in range(3)] for _ in range(2)] for _ in range(4)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), "batches": batches}


def token_mean(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def right(model, optimizer, batches, inner_lr=1e-2):
    workers = [copy.deepcopy(model) for _ in batches[0]]
    inner = [torch.optim.AdamW(w.parameters(), lr=inner_lr) for w in workers]
    for round_ in batches:
        for w, opt, mine in zip(workers, inner, round_):
            with torch.no_grad():
                for p, q in zip(w.parameters(), model.parameters()):
                    p.copy_(q)
            for b in mine:
                opt.zero_grad()
                token_mean(w, b["ids"]).backward()
                opt.step()
        for p, *ps in zip(model.parameters(), *(w.parameters() for w in workers)):
            p.grad = p.detach() - torch.stack([q.detach() for q in ps]).mean(0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    b = make(0)
    ids = torch.cat([x["ids"] for r in b["batches"] for w in r for x in w])
    before = token_mean(b["model"], ids).item()
    solo, ref = copy.deepcopy(b["model"]).double(), copy.deepcopy(b["model"]).double()     # float64: Adam turns the rounding of the (zero) key-bias gradient into steps
    right(**b)
    after = token_mean(b["model"], ids).item()
    one = [[r[0]] for r in b["batches"]]
    right(solo, torch.optim.SGD(solo.parameters(), lr=1.0), one)
    opt = torch.optim.AdamW(ref.parameters(), lr=1e-2)
    for r in one:
        for x in r[0]:
            opt.zero_grad()
            token_mean(ref, x["ids"]).backward()
            opt.step()
    gap = max((p - q).abs().max().item() for p, q in zip([*solo.emb.parameters(), *solo.out.parameters(), *solo.head.parameters()], [*ref.emb.parameters(), *ref.out.parameters(), *ref.head.parameters()]))
    print("loss", before, "->", after, "one worker against AdamW: gap", gap)
    assert after < before and gap < 1e-3

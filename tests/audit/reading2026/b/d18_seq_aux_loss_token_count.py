"""The sequence-level balance loss is scaled by the tokens of one sequence instead of the micro-batch. NVIDIA/Megatron-LM#5798,
https://github.com/NVIDIA/Megatron-LM/pull/5798, 2026.
With per-token loss all gradients are divided by the total token count at the end, so the auxiliary loss is multiplied beforehand by the tokens of the micro-batch. For the sequence-wise
variant the count came from a tensor reshaped to [seq_len, batch * experts]: seq_len only. The balance gradient is too weak by the micro-batch size."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, all rows full, [rows, time + 1]"}
SETTINGS = {"micro_batch_size": "rows for each micro-batch, 2", "aux_coef": "weight of the balance loss, 0.05", "topk": "experts for each token, 2"}
NOTES = ("Mixture of experts: next-token cross entropy, mean over all tokens of the global batch, plus aux_coef times the sequence-wise load-balance loss (experts * sum f_i p_i, "
         "f without gradient), mean over sequences. Computed as sums over micro-batches divided once by all tokens; must not depend on micro_batch_size.")


class MoE(nn.Module):
    def __init__(self, V=30, D=12, E=4):
        super().__init__()
        self.emb, self.router, self.out = nn.Embedding(V, D), nn.Linear(D, E, bias=False), nn.Linear(D, V)
        self.experts = nn.Parameter(torch.randn(E, D, D) * 0.3)

    def forward(self, ids, topk):
        h = self.emb(ids)
        p = self.router(h).softmax(-1)
        w, i = p.topk(topk, -1)
        routing = torch.zeros_like(p).scatter(-1, i, 1.0)
        gate = p * routing
        y = torch.einsum("bte,btd,edf->btf", gate, h, self.experts)
        return self.out(h + y), p, routing


def _seq_aux(p, routing, topk):
    E, T = p.shape[-1], p.shape[1]
    f = routing.sum(1) / (T * topk) * E
    return (f.detach() * p.mean(1)).sum(-1).mean()


def _run(model, batch, mbs, aux_coef, topk, count):
    ids = batch["ids"]
    total = ids.shape[0] * (ids.shape[1] - 1)
    loss = 0.0
    for mb in ids.split(mbs):
        lg, p, routing = model(mb[:, :-1], topk)
        nll = F.cross_entropy(lg.flatten(0, 1), mb[:, 1:].flatten(), reduction="sum")
        loss = loss + nll + aux_coef * _seq_aux(p, routing, topk) * count(routing)
    return loss / total


def broken(model, batch, micro_batch_size=2, aux_coef=0.05, topk=2):
    def count(routing):
        flat = routing.transpose(0, 1).reshape(routing.shape[1], -1)     # [seq, batch * experts]
        return flat.shape[0]
    return _run(model, batch, micro_batch_size, aux_coef, topk, count)


def right(model, batch, micro_batch_size=2, aux_coef=0.05, topk=2):
    def count(routing):
        flat = routing.transpose(0, 1).reshape(routing.shape[1], -1)     # [seq, batch * experts]
        return flat.shape[0] * routing.shape[0]
    return _run(model, batch, micro_batch_size, aux_coef, topk, count)


def make(seed):
    torch.manual_seed(seed)
    return {"model": MoE(), "ids": torch.randint(0, 30, (4, 9))}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    for mbs in (1, 2, 4):
        print("micro-batch", mbs, "broken", broken(m, x, mbs).item(), "right", right(m, x, mbs).item())
    assert torch.allclose(right(m, x, 1), right(m, x, 4)) and not torch.allclose(broken(m, x), right(m, x), atol=1e-4)

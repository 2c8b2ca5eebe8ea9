"""Gradient clipping over tensor-parallel ranks: the squared norm is summed over ranks, but parameters that every rank holds a copy of
(layer norm, biases of row-parallel layers) are counted on rank 0 only; ranks other than 0 seem to 'forget' gradients. Without that, replicated
weights would count W times (Megatron-LM param_is_not_tensor_parallel_duplicate, clip_grads.py with eps 1e-6)."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model with the full weights; sharded views are made inside", "optimizer": "SGD over the model",
          "batches": "list of micro-batches, dict with ids [rows, time]; gradients are the mean over micro-batches"}
SETTINGS = {"tp_ranks": "tensor-parallel ranks, 2", "max_norm": "clip of the global norm, 0.5"}
NOTES = ("One optimizer step. Sharded parameters: 'up.weight', 'up.bias' by rows, 'down.weight' by columns; everything else is replicated. "
         "The norm is the L2 norm of the full gradient, each entry counted once; coefficient max_norm / (norm + 1e-6), capped at 1. "
         "The MLP width (16) must be divisible by tp_ranks. Loss per micro-batch: mean over next tokens; mean over equally weighted micro-batches (they have the same number of tokens).")

SHARD_DIM = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class LM(torch.nn.Module):
    def __init__(self, vocab=21, width=8, inner=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)
        self.out = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids).cumsum(1)
        return self.out(h + self.down(F.gelu(self.up(self.norm(h)))))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LM()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [{"ids": torch.randint(0, 21, (4, 9), generator=g)} for _ in range(2)]}


def right(model, optimizer, batches, tp_ranks=2, max_norm=0.5):
    optimizer.zero_grad(set_to_none=True)
    for b in batches:
        loss = F.cross_entropy(model(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())
        (loss / len(batches)).backward()
    per_rank = []
    for r in range(tp_ranks):                      # what each rank would hold
        held = {}
        for name, p in model.named_parameters():
            held[name] = p.grad.chunk(tp_ranks, SHARD_DIM[name])[r] if name in SHARD_DIM else p.grad
        per_rank.append(held)
    square = 0.0
    for r, held in enumerate(per_rank):            # all-reduce SUM of the local squares
        for name, g in held.items():
            if name in SHARD_DIM or r == 0:
                square = square + g.pow(2).sum()
    coef = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(coef)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    for seed in range(3):
        for w, clip in ((1, 0.5), (2, 0.5), (4, 0.1), (2, 1e9)):
            d = make(seed)
            ref = copy.deepcopy(d["model"])
            right(**d, tp_ranks=w, max_norm=clip)
            ids = torch.cat([b["ids"] for b in d["batches"]])
            lp = ref(ids[:, :-1]).log_softmax(-1)
            (-lp.gather(-1, ids[:, 1:, None]).mean()).backward()
            norm = torch.nn.utils.clip_grad_norm_(ref.parameters(), clip)
            err = max((p - (q - 0.5 * q.grad)).abs().max().item() for p, q in zip(d["model"].parameters(), ref.parameters()))
            moved = max((0.5 * q.grad).abs().max().item() for q in ref.parameters())
            print(f"W={w} clip {clip} norm {norm:.4f} moved {moved:.4f} error {err:.1e}")
            assert err < 1e-6 and moved > 1e-4

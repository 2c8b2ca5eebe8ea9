"""AdamW inherits bf16 from the parameters: small updates are rounded away. areal-project/AReaL#1292, https://github.com/areal-project/AReaL/issues/1292, 2026 (fix: AReaL#1369).
With actor.dtype=bfloat16 the model was loaded in bf16 and torch.optim.AdamW was built over its parameters, so the parameters and both moments
were bf16. Updates smaller than half a unit of the last place of a weight vanish; the late loss plateaued about three times
higher than with fp32 master weights. Fixed by storing the parameters in fp32 and computing forward and backward in bf16."""
import torch
import torch.nn.functional as F
from torch.func import functional_call

FAMILY = "adapters, merging and low precision"
KIND = "update"
INPUTS = {"model": "tiny language model (ids -> logits), created in fp32", "optimizer": "AdamW over its parameters, learning rate 1e-4, no weight decay",
          "batches": "a list of dicts with ids [rows, time], one optimizer step each"}
SETTINGS = {"dtype": "dtype of forward and backward, torch.bfloat16"}
NOTES = ("one optimizer step per batch, in order; loss = mean next-token cross-entropy, computed with the forward in dtype and the log-softmax in fp32; mixed precision: forward and "
         "backward in dtype, parameters and optimizer state in fp32 (master weights). The result is the fp32 result up to the noise of bf16 gradients. No clipping.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    data = torch.randint(0, 32, (6, 9))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0),
            "batches": [{"ids": data[i % 3 * 2:i % 3 * 2 + 2]} for i in range(12)]}


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def broken(model, optimizer, batches, dtype=torch.bfloat16):
    model.to(dtype)                                        # the model is loaded in the dtype of the forward
    for b in batches:
        optimizer.zero_grad()
        loss_of(model(b["ids"]), b["ids"]).backward()
        optimizer.step()
    optimizer.zero_grad()


def right(model, optimizer, batches, dtype=torch.bfloat16):
    for b in batches:
        optimizer.zero_grad()
        cast = {n: p.to(dtype) for n, p in model.named_parameters()}
        loss_of(functional_call(model, cast, (b["ids"],)), b["ids"]).backward()
        optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    vec = lambda m: torch.cat([p.detach().float().flatten().clone() for p in m.parameters()])
    start = vec(make(0)["model"])
    ref = make(0)
    for b in ref["batches"]:
        ref["optimizer"].zero_grad()
        loss_of(ref["model"](b["ids"]), b["ids"]).backward()
        ref["optimizer"].step()
    want = vec(ref["model"]) - start
    for fn in (broken, right):
        case = make(0)
        fn(**case)
        base = start.bfloat16().float() if fn is broken else start
        got = vec(case["model"]) - base
        print(fn.__name__, "weights that moved", (got != 0).float().mean().item(), "length", got.norm().item(), "fp32", want.norm().item(),
              "cosine with fp32", torch.cosine_similarity(got, want, 0).item())
    assert torch.cosine_similarity(got, want, 0) > 0.98

"""AddAuxiliaryLoss of DeepSeek's modeling files: the sequence-wise balancing loss is put into the gradient by an autograd function that returns its input unchanged.
The returned loss value does not contain the balancing loss, its gradient does."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses"
KIND = "loss"
INPUTS = {"ids": "token ids of full rows without padding, [rows, time]"}
SETTINGS = {"alpha": "weight of the balancing loss, 0.05", "topk": "experts per token, 2"}
NOTES = ("The returned value is the mean next-token cross entropy of all rows (logits at t for the token at t+1) and nothing else. The gradient is that of cross entropy + alpha * mean over rows of sum_e f_e P_e: the balancing loss is attached to the output of the MoE layer by an autograd function that passes the value through and hands gradient 1 to the balancing loss in backward "
         "(whatever gradient arrives at the layer; so the loss must be backpropagated once with factor 1). f_e = E/(topk*time) times the number of tokens of the row that chose e (constant), P_e = mean over the tokens of the row of the full softmax score. Hence value and gradient of the returned scalar do not fit together by finite differences, on purpose. All parameters are used.")

class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype, ctx.needs = loss.dtype, loss.requires_grad
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=ctx.dtype) if ctx.needs else None

class LM(nn.Module):
    def __init__(self, vocab=25, width=16, experts=4):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.w = nn.Parameter(torch.randn(experts, width, width) / 4)
        self.head = nn.Linear(width, vocab)
    def parts(self, ids, topk):
        h = self.rnn(self.emb(ids))[0]
        s = self.router(3 * h).softmax(-1)
        idx = s.topk(topk, -1).indices
        chosen = F.one_hot(idx, s.shape[-1]).sum(-2).to(h.dtype)
        y = torch.einsum("bte,btd,edf->btf", s * chosen, h, self.w)
        f = chosen.sum(1) * s.shape[-1] / (topk * ids.shape[1])
        return h, y, (f * s.mean(1)).sum(-1).mean()

def make(seed):
    torch.manual_seed(seed)
    return {"ids": torch.randint(0, 25, (4, 10)), "model": LM()}

def _ce(model, h, y, ids):
    return F.cross_entropy(model.head(h + y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def right(model, batch, alpha=0.05, topk=2):
    h, y, aux = model.parts(batch["ids"], topk)
    y = AddAuxiliaryLoss.apply(y, alpha * aux)
    return _ce(model, h, y, batch["ids"])

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward(); g = {n: p.grad.clone() for n, p in m.named_parameters()}
    m.zero_grad(); h, y, aux = m.parts(d["ids"], 2); ce = _ce(m, h, y, d["ids"]); (ce + 0.05 * aux).backward()
    diff = max((p.grad - g[n]).abs().max().item() for n, p in m.named_parameters())
    print("value", l.item(), "cross entropy", ce.item(), "gradient difference to ce + alpha*aux", diff); assert abs(l - ce) < 1e-6 and diff < 1e-6

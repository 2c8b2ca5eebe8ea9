"""MoEAuxLossAutoScaler (Megatron-LM, DeepSeek-V2 remote code AddAuxiliaryLoss): the auxiliary loss is never added to the returned loss. An autograd function passes an activation through unchanged and hands the auxiliary loss a gradient in the backward; a scale, set by the trainer, keeps it in step with the factor on the main loss.
The reported loss is the language-model loss alone, yet the router is balanced."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "mixture of experts and auxiliary losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; token t+1 is the target of position t", "attention_mask": "1 for a real token, 0 for right padding, [rows, time]"}
SETTINGS = {"aux_weight": "weight of the balance loss, 0.05"}
VALUES = {"aux_weight": 0.05}
NOTES = """Returns (lm, metrics). lm is the next-token cross-entropy, mean over the targets that are real tokens of all rows; the value that is returned and logged does NOT contain the auxiliary loss. The gradient does: calling lm.backward() gives the gradient of lm + aux_weight * balance. This is done by an identity on the expert weights whose
backward gives the balance loss the gradient aux_weight (a backward with an upstream factor c on lm leaves the injected part at aux_weight; a trainer that scales the loss passes the same factor to Inject.scale, which is 1 here). balance = E * sum_e f_e * P_e over the real tokens of all rows (T of them):
f_e = assignments to expert e / (T * top_k), constant; P_e = mean of the softmax probability of expert e over ALL real tokens, with gradient. Padding counts neither in lm nor in balance. The metric "balance" is unweighted and detached. All parameters are used."""


class Inject(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, activation, aux):
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx, g):
        return g, g.new_tensor(Inject.scale)


class MoE(nn.Module):
    def __init__(self, width=12, experts=4, top_k=2):
        super().__init__()
        self.router, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.w = nn.Parameter(torch.randn(experts, width, width) * 0.3)

    def forward(self, x, real, aux_weight, inject=True):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.topk(self.top_k, -1)
        experts = probs.shape[-1]
        n = real.sum()
        f = (F.one_hot(chosen, experts).sum(1) * real[:, None]).sum(0) / (n * self.top_k)
        p = (probs * real[:, None]).sum(0) / n
        balance = experts * (f * p).sum()
        if inject:
            weight = Inject.apply(weight, aux_weight * balance)
        outs = torch.tanh(torch.einsum("nd,edf->nef", x, self.w))
        return (weight[..., None] * outs.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))).sum(1), balance


class LM(nn.Module):
    def __init__(self, vocab=19, width=12):
        super().__init__()
        self.emb, self.rnn, self.moe, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), MoE(width), nn.Linear(width, vocab)

    def forward(self, ids, mask, aux_weight, inject=True):
        h, _ = self.rnn(self.emb(ids))
        y, balance = self.moe(h.flatten(0, 1), mask.flatten().to(h.dtype), aux_weight, inject)
        return self.head(h + y.view_as(h)), balance


def make(seed):
    torch.manual_seed(seed)
    mask = (torch.arange(9)[None] < torch.tensor([[9], [5], [7]])).long()
    return {"model": LM(), "ids": torch.randint(0, 19, (3, 9)) * mask, "attention_mask": mask}


def _lm(logits, batch):
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    m = batch["attention_mask"][:, 1:].flatten().to(nll.dtype)
    return (nll * m).sum() / m.sum()


def right(model, batch, aux_weight=0.05):
    logits, balance = model(batch["ids"], batch["attention_mask"], aux_weight)
    return _lm(logits, batch), {"balance": balance.detach()}


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss, met = right(m, b, **VALUES); loss.backward()
    got = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    logits, balance = m(b["ids"], b["attention_mask"], 0.05, inject=False)
    lm = _lm(logits, b); (lm + 0.05 * balance).backward()
    diff = max(float((a - p.grad).abs().max()) for a, p in zip(got, m.parameters()))
    m.zero_grad(); _lm(m(b["ids"], b["attention_mask"], 0.05, inject=False)[0], b).backward()
    print("loss == lm", loss.item() == lm.item(), "balance", float(met["balance"]), "gradient vs explicit sum", diff,
          "| gradients change when balance is left out by", max(float((a - p.grad).abs().max()) for a, p in zip(got, m.parameters())))

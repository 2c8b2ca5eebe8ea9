"""The multi-token-prediction loss is taken over prompt and padding. NVIDIA-NeMo/Megatron-Bridge#6103, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103, 2026.
The forward step applies loss_mask to the language-model loss but does not pass it to the model, where the MTP loss falls back to a mask of ones. MTP and its gradient cover padding and, in answer-only SFT,
the prompt: mtp loss 15.8 beside lm loss 3.05."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt, answer, padding (token 0), [rows, time]", "loss_mask": "1 where the token is an answer token and is trained, [rows, time]"}
SETTINGS = {"mtp_weight": "weight of the MTP loss, 0.1"}
NOTES = ("Next-token cross entropy, mean over trained tokens of all rows, plus mtp_weight times the cross entropy of a second head that predicts the token after the next, mean over the trained ones among its targets. "
         "A target counts if loss_mask is 1 on that target token. All parameters are used.")

class Tiny(torch.nn.Module):
    """One attention layer with rotary (relative) positions. `allowed` says which keys a query may see; causal always holds."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(width, vocab)

    @staticmethod
    def rotate(x, positions):
        half = x.shape[-1] // 2
        angle = positions[..., None].float() / 10.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def hidden(self, ids, positions=None, allowed=None):
        time = ids.shape[1]
        if positions is None:
            positions = torch.arange(time).expand(ids.shape)
        see = torch.ones(time, time).tril().bool().expand(ids.shape[0], time, time)
        if allowed is not None:
            see = see & (allowed | torch.eye(time).bool())
        x = self.emb(ids)
        q, k = self.rotate(self.q(x), positions), self.rotate(self.k(x), positions)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~see, float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))
class WithMTP(Tiny):
    def __init__(self):
        super().__init__()
        self.mtp = torch.nn.Linear(16, 32)

    def forward(self, ids, labels=None, loss_mask=None):
        """Logits, and if labels are given the mean MTP loss; labels[t] is the token after t."""
        h = self.hidden(ids)
        logits = self.head(h)
        if labels is None:
            return logits, None
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float)
        target, mask = labels[:, 1:], loss_mask[:, 1:]
        nll = F.cross_entropy(self.mtp(h)[:, :-1].transpose(1, 2), target, reduction="none")
        return logits, (nll * mask).sum() / mask.sum()

def make(seed):
    torch.manual_seed(seed)
    ids, mask = torch.zeros(4, 15, dtype=torch.long), torch.zeros(4, 15)
    for r, (p, end) in enumerate(((6, 12), (4, 9), (7, 15), (5, 8))):
        ids[r, :end] = torch.randint(1, 32, (end,))
        mask[r, p:end] = 1
    return {"model": WithMTP(), "ids": ids, "loss_mask": mask}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def lm_loss(logits, labels, mask):
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (nll * mask).sum() / mask.sum()

def broken(model, batch, mtp_weight=0.1):
    ids, labels, mask = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    logits, mtp = model(ids, labels=labels)
    return lm_loss(logits, labels, mask) + mtp_weight * mtp

def right(model, batch, mtp_weight=0.1):
    ids, labels, mask = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    logits, mtp = model(ids, labels=labels, loss_mask=mask)
    return lm_loss(logits, labels, mask) + mtp_weight * mtp

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = broken(model, batch), right(model, batch)
    print("loss", a.item(), b.item(), "gradient difference", float((grads(a, model) - grads(b, model)).norm()))
    assert (grads(a, model) - grads(b, model)).norm() > 1e-2

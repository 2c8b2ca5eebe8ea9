"""Top-k on-policy distillation uses the KL of the state as a detached reward of the sampled token. radixark/miles#2362,
https://github.com/radixark/miles/issues/2362, 2026. The reverse KL over the student's top-k tokens is one number per position that does not depend on the sampled token; subtracted from the
advantage it carries no teacher signal (its expected gradient is zero, apart from favouring some states). The objective is the subset KL itself, with a gradient through the student."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and sampled response, [rows, time]", "response_mask": "1 on response tokens, [rows, time]",
          "teacher_logprobs": "teacher's log distribution for the token at each position, [rows, time, vocab]; entry t scores token t"}
SETTINGS = {"k": "student tokens kept per position, 6"}
NOTES = ("On-policy distillation: reverse KL(student || teacher) on the student's top k tokens, both renormalized on them; mean over response tokens of all rows. The choice of the top k and the teacher are constants. "
         "All parameters are used. No importance ratio: rollouts come from the current student.")

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
def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 12))
    mask = torch.zeros(3, 12)
    for r, (p, end) in enumerate(((4, 12), (5, 10), (3, 11))):
        mask[r, p:end] = 1
    return {"model": Tiny(), "ids": ids, "response_mask": mask, "teacher_logprobs": F.log_softmax(2 * torch.randn(3, 12, 32), -1)}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def student(model, batch):
    """Log distribution for the token at position t = 1 ..., with mask and teacher cut to match."""
    lp = F.log_softmax(model(batch["ids"])[:, :-1], -1)
    return lp, batch["response_mask"][:, 1:], batch["teacher_logprobs"][:, 1:]

def subset_kl(lp, teacher, k):
    top = lp.detach().topk(k, -1).indices
    p, q = F.log_softmax(lp.gather(-1, top), -1), F.log_softmax(teacher.gather(-1, top), -1)
    return (p.exp() * (p - q)).sum(-1)

def broken(model, batch, k=6):
    lp, mask, teacher = student(model, batch)
    advantage = -subset_kl(lp, teacher, k).detach()
    taken = lp.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return (-(advantage * taken) * mask).sum() / mask.sum()

def right(model, batch, k=6):
    lp, mask, teacher = student(model, batch)
    return (subset_kl(lp, teacher, k) * mask).sum() / mask.sum()

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = broken(model, batch), right(model, batch)
    ga, gb = grads(a, model), grads(b, model)
    print("loss", a.item(), b.item(), "cosine of the gradients", float(F.cosine_similarity(ga, gb, dim=0)))
    assert float(F.cosine_similarity(ga, gb, dim=0)) < 0.5
    for name, f in (("broken", broken), ("right", right)):
        torch.manual_seed(0)
        m = Tiny()
        opt = torch.optim.Adam(m.parameters(), lr=0.02)
        for _ in range(60):
            opt.zero_grad()
            f(m, batch).backward()
            opt.step()
        print(name, "after 60 updates on this batch: subset KL", right(m, batch).item())

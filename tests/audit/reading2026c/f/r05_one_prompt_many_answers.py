"""Right: the prompt of a group is stored once, followed by all its answers. Each answer sees the prompt and itself but no other answer, its positions restart at the prompt's length, and its first token is predicted from the last prompt token, which lies far back in the row."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompt, then the answers one after another, [groups, time]", "part": "0 on the prompt, 1, 2, ... on the answers, -1 on padding, [groups, time]", "advantages": "one per answer, [groups, answers]"}
SETTINGS = {}
NOTES = ("Policy gradient: minus advantage times logprob, summed over the tokens of an answer, mean over all answers of all groups (so long answers weigh more, as in an unnormalized sequence objective). advantages are constants. "
         "Every group has 3 answers; positions of an answer continue from the prompt. All parameters are used.")

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
    ids, part = torch.zeros(2, 18, dtype=torch.long), torch.full((2, 18), -1)
    for g, lengths in enumerate(([5, 4, 3, 5], [4, 2, 6, 3])):
        at = 0
        for n, length in enumerate(lengths):
            ids[g, at:at + length] = torch.randint(1, 32, (length,))
            part[g, at:at + length] = n
            at += length
    return {"model": Tiny(), "ids": ids, "part": part, "advantages": torch.randn(2, 3)}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch):
    ids, part = batch["ids"], batch["part"]
    same = part[:, :, None] == part[:, None, :]
    allowed = same | ((part[:, :, None] > 0) & (part[:, None, :] == 0))
    prompt = (part == 0).sum(1, keepdim=True)
    positions = same.tril(-1).sum(-1) + torch.where(part > 0, prompt, 0)
    lp = F.log_softmax(model(ids, positions, allowed), -1)
    before = torch.arange(ids.shape[1]).expand(ids.shape) - 1
    first = (part > 0) & (part != F.pad(part, (1, 0))[:, :-1])
    before = torch.where(first, prompt - 1, before).clamp(min=0)  # the token that predicts this one
    taken = lp[torch.arange(ids.shape[0])[:, None], before].gather(-1, ids[..., None]).squeeze(-1)
    weight = batch["advantages"].gather(1, (part - 1).clamp(min=0)) * (part > 0)
    return -(weight * taken).sum() / batch["advantages"].numel()

def slow(model, batch):
    total = 0.0
    for g in range(batch["ids"].shape[0]):
        prompt = batch["ids"][g][batch["part"][g] == 0]
        for a in range(batch["advantages"].shape[1]):
            answer = batch["ids"][g][batch["part"][g] == a + 1]
            row = torch.cat([prompt, answer])
            lp = F.log_softmax(model(row[None])[0], -1)[len(prompt) - 1:-1]
            total = total - batch["advantages"][g, a] * lp.gather(-1, answer[:, None]).sum()
    return total / batch["advantages"].numel()

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = right(model, batch), slow(model, batch)
    print("loss", a.item(), b.item(), "gradient", float(grads(a, model).norm()))
    assert torch.allclose(a, b, atol=1e-4) and torch.allclose(grads(a, model), grads(b, model), atol=1e-4)

"""Right: KTO. The KL baseline is estimated on mismatched pairs: the answers are rolled by one row, so each prompt is scored with another row's answer. The baseline is clamped at 0 and detached, and the two kinds of rows have different signs inside the sigmoid and different weights."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"prompts": "prompt ids, [rows, 4]", "answers": "answer ids, 0 as padding on the right, [rows, 6]", "good": "1 for a wanted answer, 0 for an unwanted one, [rows]",
          "ref_logprobs": "reference model's summed logprob of each row's answer, [rows]", "ref_kl_logprobs": "reference model's summed logprob of the answer of the row before, under this row's prompt, [rows]"}
SETTINGS = {"beta": "0.2", "good_weight": "1.0", "bad_weight": "1.5"}
NOTES = "KTO: 1 - sigmoid(beta * (log ratio - z)) for wanted, 1 - sigmoid(beta * (z - log ratio)) for unwanted rows, weighted, mean over rows; z = mean log ratio of the mismatched pairs, clamped at 0, no gradient. Mismatched on purpose. Needs at least 2 rows. ref entries are constants; all parameters are used."

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
def answer_logprob(model, prompts, answers):
    ids = torch.cat([prompts, answers], 1)
    lp = F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, prompts.shape[1] - 1:]
    return (lp * (answers != 0)).sum(-1)

def make(seed):
    torch.manual_seed(seed)
    prompts, answers = torch.randint(1, 32, (4, 4)), torch.randint(1, 32, (4, 6))
    answers[torch.arange(6)[None] >= torch.tensor([[6], [4], [5], [3]])] = 0
    reference, model = Tiny(), Tiny()
    with torch.no_grad():
        ref, ref_kl = answer_logprob(reference, prompts, answers), answer_logprob(reference, prompts, answers.roll(1, 0))
    return {"model": model, "prompts": prompts, "answers": answers, "good": torch.tensor([1.0, 0.0, 1.0, 0.0]), "ref_logprobs": ref, "ref_kl_logprobs": ref_kl}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def right(model, batch, beta=0.2, good_weight=1.0, bad_weight=1.5):
    ratio = answer_logprob(model, batch["prompts"], batch["answers"]) - batch["ref_logprobs"]
    with torch.no_grad():
        other = answer_logprob(model, batch["prompts"], batch["answers"].roll(1, 0)) - batch["ref_kl_logprobs"]
        z = other.mean().clamp(min=0)
    sign = 2 * batch["good"] - 1
    weight = torch.where(batch["good"] > 0, good_weight, bad_weight)
    return (weight * (1 - torch.sigmoid(beta * sign * (ratio - z)))).mean(), {"kl": float(z)}

def slow(model, batch, beta=0.2, good_weight=1.0, bad_weight=1.5):
    n, total, others = len(batch["good"]), 0.0, []
    def alone(prompt, answer):
        answer = answer[answer != 0]
        lp = F.log_softmax(model(torch.cat([prompt, answer])[None])[0], -1)
        return sum(lp[len(prompt) - 1 + i, t] for i, t in enumerate(answer))
    for r in range(n):
        others.append(float(alone(batch["prompts"][r], batch["answers"][r - 1]).detach() - batch["ref_kl_logprobs"][r]))
    z = max(0.0, sum(others) / n)
    for r in range(n):
        ratio = alone(batch["prompts"][r], batch["answers"][r]) - batch["ref_logprobs"][r]
        if batch["good"][r]:
            total = total + good_weight * (1 - torch.sigmoid(beta * (ratio - z)))
        else:
            total = total + bad_weight * (1 - torch.sigmoid(beta * (z - ratio)))
    return total / n

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    for seed in range(6):
        model, batch = split(make(seed))
        (a, metrics), b = right(model, batch), slow(model, batch)
        print("loss", a.item(), b.item(), metrics, "gradient", float(grads(a, model).norm()))
        assert torch.allclose(a, b, atol=1e-5) and torch.allclose(grads(a, model), grads(b, model), atol=1e-5)

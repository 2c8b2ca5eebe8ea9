"""GKD's generalised Jensen-Shannon distillation: F.kl_div gets the MIXTURE as input and teacher resp. student as target, so the arguments look reversed, the student's gradient also runs through the 'target' and through the mixture. beta weights the mixture
by the teacher and is also the weight of the teacher term; temperature is not compensated by T^2. Agarwal et al. 2023; TRL GKDTrainer.generalized_jsd_loss."""
import math
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0", "labels": "ids on the answer, -100 elsewhere, [rows, time], aligned with ids (shift inside)",
          "teacher_logits": "logits of the frozen teacher for the same rows, [rows, time, vocab], constant"}
SETTINGS = {"beta": "mixture coefficient of the JSD, 0.3 (0 would be forward KL, 1 reverse KL; both need another formula and are excluded)", "temperature": "softening of both, 0.9"}
NOTES = ("Distillation (generalised JSD, full vocabulary). Reduction: sum over the vocabulary, mean over answer tokens of all rows. The student is differentiated in all places where it occurs. No T^2 factor. "
         "0 < beta < 1. teacher_logits is constant. The loss is 0 exactly if student equals teacher. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 6, 10, 32)
    labels = ids.masked_fill(mask == 0, -100)
    return {"model": TinyLM(), "ids": ids, "labels": labels, "teacher_logits": 1.5 * torch.randn(6, 10, 32, generator=g)}


def right(model, batch, beta=0.3, temperature=0.9):
    keep = batch["labels"][:, 1:] != -100
    student = (model(batch["ids"])[:, :-1][keep] / temperature).log_softmax(-1)
    teacher = (batch["teacher_logits"][:, :-1][keep] / temperature).log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([student + math.log(1 - beta), teacher + math.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)      # KL(teacher || mixture)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)      # KL(student || mixture)
    return (beta * kl_teacher + (1 - beta) * kl_student).sum() / keep.sum()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, slow, n = right(model, d), 0.0, 0
    for i in range(6):
        for t in range(1, 10):
            if d["labels"][i, t] != -100:
                s = (model(d["ids"][i:i + 1, :t])[0, -1] / 0.9).softmax(-1)
                q = (d["teacher_logits"][i, t - 1] / 0.9).softmax(-1)
                m = 0.7 * s + 0.3 * q
                slow, n = slow + 0.3 * (q * torch.log(q / m)).sum() + 0.7 * (s * torch.log(s / m)).sum(), n + 1
    g1, g2 = grads(loss, model), grads(slow / n, model)
    print("loss", loss.item(), "explicit", (slow / n).item(), "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    same = {**d, "teacher_logits": model(d["ids"]).detach()}
    print("student = teacher gives", right(model, same).item())
    assert abs(loss.item() - (slow / n).item()) < 1e-5 and close(g1, g2) and abs(right(model, same).item()) < 1e-6

"""DistiLLM skewed reverse KL (Ko et al. 2024, arXiv 2402.03898): KL(q || (1-a)*p + a*q) with the student q on both sides. The gradient also flows through the student
inside the mixture; detaching it there would be another objective. The loss is bounded by -log(a)."""
import math
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "supervised and distillation losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; token t+1 is the target of position t",
          "loss_mask": "1 where the token is trained (responses), 0 for prompt and padding, [rows, time], belongs to the token itself",
          "teacher_logits": "logits of the frozen teacher, [rows, time, vocab]; entry t predicts token t+1"}
SETTINGS = {"skew": "share a of the STUDENT in the mixture, 0.1"}
VALUES = {"skew": 0.1}
NOTES = """Skewed reverse KL of DistiLLM. For each position t whose target token t+1 has loss_mask 1: KL(q || m), m = (1-skew)*p + skew*q, p teacher, q student, both
softmax at temperature 1, sum over the whole vocabulary. The mixture contains the student WITH its gradient (m is not a constant); only the teacher is constant. Every position value lies
in [0, -log(skew)]. Mean over the trained tokens of all rows (pooled, not per row). The last position has no target and column 0 of loss_mask is never used.
All parameters are used. Any number of rows."""


class LM(nn.Module):
    def __init__(self, vocab=21, width=14):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0]])
    return {"model": LM(), "ids": torch.randint(0, 21, (3, 8)), "loss_mask": mask, "teacher_logits": torch.randn(3, 8, 21) * 2}


def right(model, batch, skew=0.1):
    log_q = F.log_softmax(model(batch["ids"])[:, :-1], -1)
    log_p = F.log_softmax(batch["teacher_logits"][:, :-1], -1)
    log_m = torch.logaddexp(log_p + math.log1p(-skew), log_q + math.log(skew))
    kl = (log_q.exp() * (log_q - log_m)).sum(-1)
    mask = batch["loss_mask"][:, 1:].to(kl.dtype)
    return (kl * mask).sum() / mask.sum()


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b, **VALUES); loss.backward()
    tot, n = 0.0, 0
    q = m(b["ids"]).detach().softmax(-1); p = b["teacher_logits"].softmax(-1)
    for r in range(3):
        for t in range(7):
            if b["loss_mask"][r, t + 1]:
                n += 1
                for v in range(21):
                    mix = 0.9 * p[r, t, v] + 0.1 * q[r, t, v]
                    tot += float(q[r, t, v] * (q[r, t, v] / mix).log())
    print("loss", loss.item(), "loop", tot / n, "bound", -math.log(0.1), "all parameters have a gradient:", all(x.grad.abs().sum() > 0 for x in m.parameters()))

"""apo_down mixes a raw and an f-divergence-transformed log-ratio. huggingface/trl#6441,
https://github.com/huggingface/trl/issues/6441 (fix: #6559), 2026. The chosen term of DPOTrainer's apo_down used the raw log-ratio, the other term the difference of scores that had gone through
f_divergence_type. Under the default reverse_kl both are the same; with any other divergence the two terms of one loss silently used different rewards."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [2*pairs, time]; the first half are the chosen rows, the second half the rejected rows of the same pairs in the same order",
    "loss_mask": "1 for the tokens of the completion, [2*pairs, time]; the first column is 0",
    "ref_logps": "summed log-probability of each completion under the reference model, [2*pairs], constant",
}
SETTINGS = {
    "beta": "strength, 0.5",
    "f_divergence": "'js_divergence' (or 'reverse_kl'): transforms the log-ratios for the sigmoid loss",
    "weights": "weights of the two losses, (1.0 for sigmoid, 1.0 for apo_down)",
}
NOTES = (
    "Sum of two preference losses. log-ratio x = summed completion log-probability of the policy minus that of the reference, for chosen (xc) and rejected (xr); token t is predicted from position t-1. "
    "Sigmoid (f-DPO): -logsigmoid(beta*(s(xc) - s(xr))) with score s(x) = x for reverse_kl and s(x) = logsigmoid(x) for js_divergence (f'(t) = log(2t/(1+t)), the constant log 2 dropped). "
    "apo_down (APO paper, eq. 8): sigmoid(beta*xc) + 1 - sigmoid(beta*(xc - xr)), defined with the plain log-ratio reward in both terms, whatever f_divergence is. "
    "Each is averaged over the pairs, then weighted and added. ref_logps are constants. All parameters of the model are used. Needs an even number of rows."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _sum_logp(model, ids, mask):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (lp * mask[:, 1:]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    pairs, time = 4, 12
    ids = torch.randint(0, 23, (2 * pairs, time), generator=g)
    ids[pairs:, :4] = ids[:pairs, :4]
    mask = torch.zeros(2 * pairs, time)
    for r in range(2 * pairs):
        mask[r, 4:int(torch.randint(7, 13, (1,), generator=g))] = 1
    with torch.no_grad():
        ref = _sum_logp(model, ids, mask) + torch.randn(2 * pairs, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref}


def _score(x, f_divergence):
    return F.logsigmoid(x) if f_divergence == "js_divergence" else x


def broken(model, batch, beta=0.5, f_divergence="js_divergence", weights=(1.0, 1.0)):
    xc, xr = (_sum_logp(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]).chunk(2)
    delta_score = _score(xc, f_divergence) - _score(xr, f_divergence)
    sigmoid = -F.logsigmoid(beta * delta_score)
    apo_down = torch.sigmoid(beta * xc) + 1 - torch.sigmoid(beta * delta_score)
    return weights[0] * sigmoid.mean() + weights[1] * apo_down.mean()


def right(model, batch, beta=0.5, f_divergence="js_divergence", weights=(1.0, 1.0)):
    xc, xr = (_sum_logp(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]).chunk(2)
    delta_score = _score(xc, f_divergence) - _score(xr, f_divergence)
    sigmoid = -F.logsigmoid(beta * delta_score)
    apo_down = torch.sigmoid(beta * xc) + 1 - torch.sigmoid(beta * (xc - xr))
    return weights[0] * sigmoid.mean() + weights[1] * apo_down.mean()


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        model = d.pop("model")
        g = []
        for f in (broken, right):
            model.zero_grad()
            l = f(model, d)
            l.backward()
            assert all(p.grad is not None for p in model.parameters())
            g.append((l.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).clone()))
        print("seed", s, "broken %.5f right %.5f, |grad difference| / |grad| %.3f" % (g[0][0], g[1][0], (g[0][1] - g[1][1]).norm() / g[1][1].norm()))
        assert abs(g[0][0] - g[1][0]) > 1e-3
        assert abs(broken(model, d, f_divergence="reverse_kl") - right(model, d, f_divergence="reverse_kl")) < 1e-6

"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783; TRL loss_type='dr_grpo', verl 'seq-mean-token-sum-norm'). The sum over the tokens is divided by rows times the configured maximum length, a constant,
not by the number of tokens; the advantage is not divided by a standard deviation. A naive reader would call both forgotten normalisations."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]",
    "loss_mask": "1 where the token was generated and is trained, [rows, time]; the first column is 0",
    "old_logp": "log-probability of token ids[:, t] under the sampling policy at entry t, [rows, time], constant",
    "rewards": "one reward per row, [rows], constant",
    "groups": "number of the prompt of each row, [rows]; all rows of a prompt are in the batch",
}
SETTINGS = {"clip": "PPO clip on both sides, 0.2", "max_len": "largest completion length of the run, 24, longer than any row here"}
NOTES = (
    "Dr. GRPO. Advantage of a row = reward minus the mean reward of its group (itself included), not divided by a standard deviation, the same for all its tokens and constant. Token loss "
    "max(-A*ratio, -A*clip(ratio, 1-clip, 1+clip)) with ratio = exp(logp - old_logp), token t predicted from position t-1. The loss is the sum over all trained tokens of all rows divided by rows*max_len, a constant that does not "
    "depend on the lengths of the answers, so every token in the whole run has the same weight. All parameters are used; any number of rows."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(0, 23, (8, 15), generator=g)
    mask = torch.zeros(8, 15)
    for r in range(8):
        mask[r, 3:int(torch.randint(6, 16, (1,), generator=g))] = 1
    with torch.no_grad():
        old = _logp(model, ids) + 0.15 * torch.randn(8, 15, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old * mask,
            "rewards": torch.randint(0, 2, (8,), generator=g).float(), "groups": torch.arange(8) // 4}


def right(model, batch, clip=0.2, max_len=24):
    m, r, gr = batch["loss_mask"], batch["rewards"], batch["groups"]
    same = (gr[:, None] == gr[None]).float()
    adv = (r - (same @ r) / same.sum(1))[:, None]
    ratio = ((_logp(model, batch["ids"]) - batch["old_logp"]) * m).exp()
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip))
    return (loss * m).sum() / (m.shape[0] * max_len)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        loss = right(model, d)
        loss.backward()
        norm = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt()
        with torch.no_grad():
            lp = _logp(model, d["ids"])
        want = 0.0
        for r in range(8):
            A = (d["rewards"][r] - d["rewards"][d["groups"] == d["groups"][r]].mean()).item()
            for t in range(15):
                if d["loss_mask"][r, t]:
                    x = (lp[r, t] - d["old_logp"][r, t]).exp().item()
                    want -= min(x * A, max(0.8, min(1.2, x)) * A) / (8 * 24)
        print("seed", seed, "loss %.6f explicit %.6f |grad| %.5f" % (loss.item(), want, norm))
        assert abs(loss.item() - want) < 1e-5 and norm > 0

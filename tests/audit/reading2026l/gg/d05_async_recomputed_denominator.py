"""Async PPO anchors the ratio to a policy that never generated the data. radixark/miles#1829,
https://github.com/radixark/miles/pull/1829, 2026. In the async loop the samples come from a policy at least one update behind
the actor. With the default flags the trainer recomputes the log-probs with the present actor and takes these as the denominator
of the PPO ratio: the ratio is 1, clipping does nothing and no correction for the behaviour policy is applied."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "update"
INPUTS = {
    "model": "causal language model, ids -> logits",
    "optimizer": "torch SGD over the model",
    "batches": "rollouts in the order in which they are trained, each generated while an earlier one was trained (by weights at least one update old); a dict: "
               "ids [rows, time]; loss_mask [rows, time], 1 on completion tokens; advantages [rows]; "
               "rollout_logps [rows, time], log-prob of each token as the inference engine recorded it when it sampled (entry t belongs to token t, entry 0 unused)",
}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("Async PPO, one optimizer step per rollout. The ratio of a token is pi_now(token) / pi_behaviour(token), the behaviour policy being the one that sampled the rollout (rollout_logps, constant). "
         "Loss = mean over all completion tokens of the rollout of -min(ratio * A, clip(ratio, 1-clip, 1+clip) * A), A the advantage of the row (constant). "
         "Because the rollout is one update old, the ratio differs from 1 already in the first step. The log-prob of token t is read from the logits at t-1. All parameters are used.")

V = 24


class TinyLM(nn.Module):
    """A causal model: ids [rows, time] -> logits [rows, time, V]; the logits at t see the tokens up to t."""

    def __init__(self, width=16):
        super().__init__()
        self.emb = nn.Embedding(V, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def token_logps(model, ids):
    """log-prob of each token given the ones before it, [rows, time]; entry 0 is 0 (nothing predicts it)"""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    batches = []
    for k in range(2):
        ids = torch.randint(1, V, (4, 8), generator=g)
        mask = torch.zeros(4, 8)
        for i, n in enumerate([6, 4, 5, 3]):
            mask[i, 2:2 + n] = 1
        with torch.no_grad():
            behaviour = token_logps(model, ids)
        batches.append({"ids": ids, "loss_mask": mask, "advantages": torch.randn(4, generator=g),
                        "rollout_logps": behaviour + 0.2 * torch.randn(4, 8, generator=g)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _loss(logp, old, batch, clip):
    m, A = batch["loss_mask"][:, 1:], batch["advantages"][:, None]
    ratio = (logp[:, 1:] - old[:, 1:]).exp()
    tok = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return (tok * m).sum() / m.sum()


def broken(model, optimizer, batches, clip=0.2):
    for b in batches:
        with torch.no_grad():
            old = token_logps(model, b["ids"])
        optimizer.zero_grad()
        _loss(token_logps(model, b["ids"]), old, b, clip).backward()
        optimizer.step()


def right(model, optimizer, batches, clip=0.2):
    for b in batches:
        optimizer.zero_grad()
        _loss(token_logps(model, b["ids"]), b["rollout_logps"], b, clip).backward()
        optimizer.step()


if __name__ == "__main__":
    out = []
    for f in (broken, right):
        m = make(0); start = m["model"].out.weight.detach().clone(); f(**m)
        out.append(m["model"].out.weight.detach() - start); print(f.__name__, "step norm", out[-1].norm().item())
    print("relative difference", ((out[0] - out[1]).norm() / out[1].norm()).item())
    assert (out[0] - out[1]).norm() > 0.05 * out[1].norm()

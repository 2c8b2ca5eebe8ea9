"""Online DPO logs KL and entropy with the log-probabilities of padding.
huggingface/trl#6818, https://github.com/huggingface/trl/pull/6818, 2026 (reported as #6803).
The trainer masked the log-probs for the loss but summed the raw per-token log-probs for the objective statistics.
Padded completion positions have finite log-probabilities, so objective/kl, objective/entropy and the derived
non-score and RLHF rewards moved with the amount of padding."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "preferences"
KIND = "loss"
INPUTS = {"ids": "prompt and completion token ids, right padded with 0; the first half of the rows are first completions, the second half second completions of the same prompts, [2 * prompts, time]",
          "completion_mask": "1 on completion tokens, 0 on prompt and padding, [2 * prompts, time]",
          "ref_logps": "log-probability of each token under the frozen reference model (finite on padding too), 0 at the first token, [2 * prompts, time]",
          "scores": "reward of each completion, [2 * prompts]"}
SETTINGS = {"beta": "DPO beta, 0.1"}
NOTES = ("Sigmoid DPO loss between the two completions of a prompt (the one with the higher score is chosen), log-probs summed "
         "over completion tokens, mean over pairs. Metrics: objective/kl = mean over completions of the sum over completion "
         "tokens of (policy - reference) log-prob; objective/entropy = mean over completions of minus the sum of the policy's "
         "log-probs of the completion tokens; objective/non_score_reward = -beta * kl; objective/rlhf_reward = mean of scores "
         "+ non_score_reward. Nothing depends on what is at padded positions. ref_logps and scores are constants. All "
         "parameters of the model are used.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, reference = TinyLM(), TinyLM()
    rows, time, prompt = 6, 12, 3
    ends = torch.randint(prompt + 2, time, (rows,), generator=g)
    ends[0] = time
    at = torch.arange(time).expand(rows, time)
    ids = torch.randint(1, 24, (rows, time), generator=g)
    ids[rows // 2:, :prompt] = ids[:rows // 2, :prompt]
    ids = ids.masked_fill(at >= ends[:, None], 0)
    completion_mask = ((at >= prompt) & (at < ends[:, None])).float()
    with torch.no_grad():
        ref = _token_logps(reference, ids)
    return {"model": model, "ids": ids, "completion_mask": completion_mask, "ref_logps": ref,
            "scores": torch.randn(rows, generator=g)}


def _token_logps(model, ids):
    logps = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros_like(logps[:, :1]), logps], 1)


def _loss(logps, ref, mask, scores, beta):
    ratio = ((logps - ref) * mask).sum(1)
    first, second = ratio.chunk(2)
    a, b = scores.chunk(2)
    sign = torch.where(a >= b, 1.0, -1.0)
    return -F.logsigmoid(beta * sign * (first - second)).mean()


def broken(model, batch, beta=0.1):
    logps, ref, mask = _token_logps(model, batch["ids"]), batch["ref_logps"], batch["completion_mask"]
    loss = _loss(logps, ref, mask, batch["scores"], beta)
    with torch.no_grad():
        kl = (logps - ref).sum(1).mean()
        entropy = -logps.sum(1).mean()
        non_score = -beta * kl
        metrics = {"objective/kl": kl, "objective/entropy": entropy, "objective/non_score_reward": non_score,
                   "objective/rlhf_reward": batch["scores"].mean() + non_score}
    return loss, metrics


def right(model, batch, beta=0.1):
    logps, ref, mask = _token_logps(model, batch["ids"]), batch["ref_logps"], batch["completion_mask"]
    loss = _loss(logps, ref, mask, batch["scores"], beta)
    with torch.no_grad():
        kl = ((logps - ref) * mask).sum(1).mean()
        entropy = -(logps * mask).sum(1).mean()
        non_score = -beta * kl
        metrics = {"objective/kl": kl, "objective/entropy": entropy, "objective/non_score_reward": non_score,
                   "objective/rlhf_reward": batch["scores"].mean() + non_score}
    return loss, metrics


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    (lb, b), (lr, r) = broken(model, batch), right(model, batch)
    print("loss", lb.item(), lr.item())
    for k in b:
        print(k, "broken", round(b[k].item(), 4), "right", round(r[k].item(), 4))
    assert lb == lr and abs(b["objective/kl"] - r["objective/kl"]) > 1e-3

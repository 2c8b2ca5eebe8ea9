"""Masked-diffusion decoding with low-confidence remasking (LLaDA, Nie et al. 2025, arXiv 2502.09992, generate.py): tokens are committed in the order of the model's
confidence and not from left to right; the model is bidirectional and the logits at t predict the token at t itself (no shift)."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "bidirectional masked LM, ids [1, time] -> logits [1, time, vocabulary]; logits at t are for the token at t", "prompt_ids": "[1, prompt length], without mask tokens", "settings": "dict, see SETTINGS"}
SETTINGS = {"gen_length": "response length, 12", "steps": "denoising steps, 4; the tokens per step are as equal as possible, the first steps get one more", "temperature": "1.0", "mask_id": "0", "seed": "0"}
NOTES = """(model, prompt_ids, settings) -> ids [gen_length], logprobs [gen_length]. The response starts as gen_length mask tokens behind the prompt. In every step the model sees the whole sequence (bidirectional); at
each masked position a candidate is drawn from softmax(logits / temperature) (the mask token is excluded), and the candidates with the greatest confidence, gen_length / steps of them, are committed;
all the others stay masked and are drawn anew. Confidence is the candidate's probability under softmax(logits) at temperature 1, mask token excluded. Committed tokens never change. logprobs[t] is the log-probability of
ids[t] under softmax(logits / temperature) of the step in which it was committed, given the then partly masked sequence; entries are in the order of positions, not of
commitment. The logits at position t belong to the token at t (no shift). logprobs.sum() is the usual step-wise surrogate: it leaves out the choice of positions, and is not the log-likelihood of the sequence. No gradient."""
import torch
from torch import nn


class BiLM(nn.Module):
    def __init__(self, v=20, d=16, max_pos=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(max_pos, d)
        self.rnn, self.head = nn.GRU(d, d, batch_first=True, bidirectional=True), nn.Linear(2 * d, v)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids) + self.pos(torch.arange(ids.shape[1])))[0]) * 4


def make(seed):
    torch.manual_seed(seed)
    return {"model": BiLM(), "prompt_ids": torch.randint(1, 20, (1, 5)), "settings": {"gen_length": 12, "steps": 4, "temperature": 1.0, "mask_id": 0, "seed": seed}}


@torch.no_grad()
def right(model, prompt_ids, settings, trace=None):
    g = torch.Generator().manual_seed(settings["seed"])
    n, mask_id, start = settings["gen_length"], settings["mask_id"], prompt_ids.shape[1]
    x = torch.cat([prompt_ids, torch.full((1, n), mask_id)], 1)
    logprobs = torch.zeros(n)
    masked = torch.ones(n, dtype=torch.bool)
    for s in range(settings["steps"]):
        count = n // settings["steps"] + int(s < n % settings["steps"])
        logits = model(x)[0, start:].clone()
        logits[:, mask_id] = float("-inf")
        lp = (logits / settings["temperature"]).log_softmax(-1)
        cand = torch.multinomial(lp.exp(), 1, generator=g)[:, 0]
        confidence = logits.softmax(-1).gather(1, cand[:, None])[:, 0].masked_fill(~masked, -1.0)
        pick = confidence.topk(count).indices
        if trace is not None:
            trace.append((x.clone(), pick.tolist(), cand[pick].tolist()))
        x[0, start + pick] = cand[pick]
        logprobs[pick] = lp[pick, cand[pick]]
        masked[pick] = False
    return x[0, start:], logprobs


if __name__ == "__main__":
    x = make(0)
    trace = []
    ids, lp = right(**x, trace=trace)
    seen, cur = set(), [0] * 12
    for seq, pos, toks in trace:
        assert seq[0, 5:].tolist() == cur and not seen & set(pos)
        for p, t in zip(pos, toks):
            z = x["model"](seq)[0, 5 + p].tolist()
            z = torch.tensor([v for i, v in enumerate(z) if i != 0])
            assert abs((z[t - 1] - z.logsumexp(0)).item() - lp[p].item()) < 1e-4
            cur[p] = t
        seen |= set(pos)
    print("order of commitment", [p for _, p, _ in trace], ids.tolist(), lp.sum().item())
    assert cur == ids.tolist() and 0 not in cur and seen == set(range(12))

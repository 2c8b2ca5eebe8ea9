"""A rollout that returns tokens it never sampled: after a call token the tool's answer is inserted into the completion with log probability 0.0
(the placeholder of verl and others for tokens that the loss masks). Log probabilities are those of the tempered distribution that was really sampled from."""
FAMILY = "agents"
KIND = "sampler"
INPUTS = {"prompt_ids": "token ids of one prompt, [time]"}
SETTINGS = {"temperature": "1.3", "max_new": "longest completion with the inserted tokens, 24", "max_calls": "tool calls that are executed, 2", "seed": "seed of the sampling, 0"}
NOTES = ("Returns (ids of the completion with tool tokens, logprobs of the same length). 0.0 exactly at inserted tokens: a sampled token has p < 1, so the value marks the insertion. Inserted runs begin "
         "with OBS and end with END_OBS, which the sampler never samples (probability 0 by a -inf logit BEFORE normalising, so the logprobs are over the remaining vocabulary). Stops at EOS, at max_new, at a call "
         "beyond max_calls, and at a call whose answer would not fit (the call token is kept, without an answer). Rescoring must use the same temperature and the same ban.")
import torch
from torch import nn

EOS, CALL, OBS, END_OBS, DIGITS = 1, 2, 3, 4, 5        # ids 5 .. 14 are digits


class TinyLM(nn.Module):
    def __init__(self, vocab=20, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def tool(history):
    """Answers with the number of digits so far and the sum of them, both modulo ten."""
    d = [t - DIGITS for t in history if DIGITS <= t < DIGITS + 10]
    return [OBS, DIGITS + len(d) % 10, DIGITS + sum(d) % 10, END_OBS]


def _dist(logits, temperature):
    logits = logits.float() / temperature
    ban = torch.zeros(logits.shape[-1], dtype=torch.bool)
    ban[[0, OBS, END_OBS]] = True
    return torch.log_softmax(logits.masked_fill(ban, float("-inf")), -1)


@torch.no_grad()
def right(model, prompt_ids, settings=None):
    s = {"temperature": 1.3, "max_new": 24, "max_calls": 2, "seed": 0, **(settings or {})}
    g = torch.Generator().manual_seed(s["seed"])
    prompt, out, logps, calls = prompt_ids.tolist(), [], [], 0
    while len(out) < s["max_new"]:
        logp = _dist(model(torch.tensor([prompt + out]))[0, -1], s["temperature"])
        token = int(torch.multinomial(logp.exp(), 1, generator=g))
        out.append(token)
        logps.append(float(logp[token]))
        if token == EOS:
            break
        if token == CALL:
            answer = tool(prompt + out)
            if calls == s["max_calls"] or len(out) + len(answer) > s["max_new"]:
                break
            calls += 1
            out += answer
            logps += [0.0] * len(answer)
    return torch.tensor(out), torch.tensor(logps)


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    with torch.no_grad():
        model.head.bias[CALL] += 1.0
    return {"model": model, "prompt_ids": torch.randint(5, 15, (4,)), "settings": {"seed": seed}}


if __name__ == "__main__":
    runs = 0
    for seed in range(40):
        c = make(seed)
        ids, lp = right(**c)
        assert len(ids) == len(lp) <= 24
        full = torch.cat([c["prompt_ids"], ids])
        with torch.no_grad():
            score = _dist(c["model"](full[None, :-1])[0], 1.3)[len(c["prompt_ids"]) - 1:]
        inside, t = [], 0
        while t < len(ids):                       # inserted runs found from the tokens alone
            n = 4 if ids[t] == OBS else 1
            if n == 4:
                assert ids[t - 1] == CALL and ids[t:t + 4].tolist() == tool(full[:len(c["prompt_ids"]) + t].tolist())
                runs += 1
            inside += [n == 4] * n
            t += n
        inside = torch.tensor(inside)
        assert (lp[inside] == 0).all() and (lp[~inside] < 0).all()
        want = score.gather(1, ids[:, None])[:, 0]
        assert torch.allclose(lp[~inside], want[~inside], atol=1e-5)
        assert torch.equal(right(**c)[0], ids)
    # frequencies of the first token against the distribution
    c = make(0)
    p = _dist(c["model"](c["prompt_ids"][None])[0, -1], 1.3).exp().detach()
    n = torch.zeros(20)
    for s in range(1500):
        n[right(c["model"], c["prompt_ids"], {"seed": s, "max_new": 1})[0][0]] += 1
    assert (n / 1500 - p).abs().max() < 0.05
    print("ok", runs, "inserted answers; largest gap of frequencies", float((n / 1500 - p).abs().max()))

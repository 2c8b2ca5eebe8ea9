"""Agent sampler that never re-tokenises (token in, token out: verl AgentLoop, prime-rl). The tool's ids are spliced behind the sampled ids with log-probability exactly 0, they do not count against the budget of new tokens, and the log-probabilities are those of the tempered distribution that was sampled from."""
import torch
from torch import nn
FAMILY = "agents"
KIND = "sampler"
INPUTS = {"model": "tiny causal model", "prompt_ids": "1-D token ids", "settings": "dict with temperature, max_new, seed"}
SETTINGS = {"temperature": "1.5; log-probabilities are of the distribution divided by the temperature", "max_new": "8, number of tokens that the model writes; tool tokens come on top", "seed": "seed of the private generator"}
NOTES = "Returns ids (prompt + all) and logprobs of the same length: 0 for the prompt and tool tokens. Token 3 = CALL, the tool answers with [4, (last token before CALL + 1) % 40, 5]; token 2 = EOS ends the run. A call with the last token of the budget is not executed. Uses no global random state."
CALL, EOS = 3, 2
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def tool(argument):
    return [4, (argument + 1) % 40, 5]

def make(seed):
    torch.manual_seed(seed); model = Tiny()
    with torch.no_grad():
        model.head.weight[CALL] += 0.6
    return {"model": model, "prompt_ids": torch.randint(6, 40, (5,)), "settings": {"temperature": 1.5, "max_new": 8, "seed": seed}}

@torch.no_grad()
def right(model, prompt_ids, settings):
    g = torch.Generator().manual_seed(settings["seed"])
    ids = prompt_ids.tolist(); logprobs = [0.0] * len(ids)
    written = 0
    while written < settings["max_new"]:
        lp = (model(torch.tensor([ids]))[0, -1] / settings["temperature"]).log_softmax(-1)
        tok = int(torch.multinomial(lp.exp(), 1, generator=g))
        ids.append(tok); logprobs.append(float(lp[tok])); written += 1
        if tok == EOS:
            break
        if tok == CALL and written < settings["max_new"]:
            answer = tool(ids[-2])
            ids += answer; logprobs += [0.0] * len(answer)
    return torch.tensor(ids), torch.tensor(logprobs)

if __name__ == "__main__":
    calls = 0
    for s in range(30):
        d = make(s); ids, lp = right(**d)
        again = right(**d); assert torch.equal(ids, again[0]) and torch.equal(lp, again[1])
        full = (d["model"](ids[None])[0] / 1.5).log_softmax(-1)
        for t in range(5, len(ids)):
            if lp[t] != 0:
                assert abs(full[t - 1, ids[t]].item() - lp[t].item()) < 1e-4
        free = int((lp[5:] == 0).sum()); assert free % 3 == 0 and len(ids) - 5 - free <= 8
        calls += free // 3
    print("tool calls in 30 runs:", calls); assert calls > 0

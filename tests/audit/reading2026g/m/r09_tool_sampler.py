"""Sampler with a tool in the loop. When the model samples END, the environment's tokens are appended without being sampled: their logprob entry is exactly 0.0 (a placeholder, as in verl's tool agent loop), and they do not use up the token budget, so the answer may be longer than max_new. Log-probabilities are those of the tempered distribution that was sampled from."""
FAMILY = "agents"
KIND = "sampler"
INPUTS = {"model": "causal LM, ids [1, T] -> logits [1, T, V]", "prompt_ids": "list of token ids",
          "settings": "dict: temperature, max_new (sampled tokens), seed"}
SETTINGS = {"temperature": "0.8", "max_new": "24 sampled tokens", "seed": "seed of the private generator"}
NOTES = "Vocabulary: 0-9 digits, 10 CALL, 11 END, 12 OBS, 13 /OBS, 14 ERR, 15 EOS. Returns (ids, logprobs) of the continuation, same length; a tool token is one between and including an environment-inserted OBS and /OBS and has logprob 0.0. OBS, /OBS, ERR are forbidden to the model (logit -inf before the softmax), so they are always the environment's. Global random state is not touched. EOS is included when sampled."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


CALL, END, OBS, END_OBS, ERR, EOS = 10, 11, 12, 13, 14, 15


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM(vocab=16)
    with torch.no_grad():
        model.head.bias[END] += 1.0
        model.head.bias[CALL] += 1.0
        model.head.bias[EOS] -= 2.0
    return {"model": model, "prompt_ids": [1, 2, CALL, 3], "settings": {"temperature": 0.8, "max_new": 24, "seed": seed}}


def tool(history):
    """Sum of the digits since the last CALL, mod 10; ERR if there is no CALL or no digit since the last END."""
    args = []
    for t in reversed(history):
        if t == CALL:
            return [OBS, sum(args) % 10, END_OBS] if args else [OBS, ERR, END_OBS]
        if t in (END, END_OBS):
            break
        args.append(t)
    return [OBS, ERR, END_OBS]


@torch.no_grad()
def right(model, prompt_ids, settings):
    gen = torch.Generator().manual_seed(settings["seed"])
    ids, lps, sampled = list(prompt_ids), [], 0
    while sampled < settings["max_new"]:
        logits = model(torch.tensor([ids]))[0, -1] / settings["temperature"]
        logits[[OBS, END_OBS, ERR]] = float("-inf")
        logp = logits.log_softmax(-1)
        t = int(torch.multinomial(logp.exp(), 1, generator=gen))
        sampled += 1
        history = ids[:]
        ids.append(t)
        lps.append(float(logp[t]))
        if t == EOS:
            break
        if t == END:
            obs = tool(history)
            ids += obs
            lps += [0.0] * len(obs)
    return ids[len(prompt_ids):], lps


if __name__ == "__main__":
    b = make(0)
    state = torch.random.get_rng_state()
    ids, lps = right(**b)
    assert torch.equal(state, torch.random.get_rng_state()) and (ids, lps) == right(**b)
    full = b["prompt_ids"] + ids
    lg = b["model"](torch.tensor([full]))[0] / 0.8
    lg[:, [OBS, END_OBS, ERR]] = float("-inf")
    lp = lg.log_softmax(-1)
    n_tool, i = 0, 0
    while i < len(ids):
        if ids[i] == OBS:
            assert ids[i + 2] == END_OBS and lps[i:i + 3] == [0.0] * 3 and ids[i - 1] == END
            n_tool += 3
            i += 3
            continue
        p = len(b["prompt_ids"]) + i
        assert abs(lp[p - 1, full[p]].item() - lps[i]) < 1e-4
        i += 1
    print(ids, "tool tokens", n_tool, "sampled", len(ids) - n_tool)
    assert n_tool > 0 and len(ids) - n_tool <= 24

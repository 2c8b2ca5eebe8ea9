"""The sampled EOS is not part of the response. rasbt/reasoning-from-scratch#185, https://github.com/rasbt/reasoning-from-scratch/pull/185, 2026.
sample_response() left the loop as soon as EOS was drawn, before it was appended, so the log-probability of stopping is neither recorded nor
trained in the policy gradient: the decision to stop gets no gradient, and in long runs the model may unlearn it."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal LM, ids [1, time] -> logits [1, time, vocabulary]", "prompt_ids": "token ids [1, prompt length]", "settings": "dict, see SETTINGS"}
SETTINGS = {"temperature": "1.0", "max_new_tokens": "limit of the response, 40", "eos_id": "end-of-sequence id, 0", "seed": "of the sampling generator, 0"}
NOTES = """(model, prompt_ids, settings) -> ids [n], logprobs [n]. Ancestral sampling from softmax(logits / temperature) until EOS is drawn or max_new_tokens tokens
are drawn. ids are all drawn tokens, a drawn EOS being the last of them (a response which reaches the limit has no EOS). logprobs[t] is the
log-probability of ids[t] under that tempered distribution given the prompt and ids[:t]; there is one entry for every draw, so logprobs.sum() is the
log-probability of the whole episode, the decision to stop included. No gradient (the trainer recomputes with gradient on prompt + ids)."""
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=20, d=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)
        self.head.bias.data[0] += 1.5

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM(), "prompt_ids": torch.randint(1, 20, (1, 4)), "settings": {"temperature": 1.0, "max_new_tokens": 40, "eos_id": 0, "seed": 0}}


@torch.no_grad()
def broken(model, prompt_ids, settings):
    g = torch.Generator().manual_seed(settings["seed"])
    ids, lps = prompt_ids, []
    for _ in range(settings["max_new_tokens"]):
        lp = (model(ids)[0, -1] / settings["temperature"]).log_softmax(-1)
        tok = torch.multinomial(lp.exp(), 1, generator=g)
        if tok.item() == settings["eos_id"]:
            break
        lps.append(lp[tok])
        ids = torch.cat([ids, tok[None]], 1)
    return ids[0, prompt_ids.shape[1]:], torch.cat(lps) if lps else torch.zeros(0)


@torch.no_grad()
def right(model, prompt_ids, settings):
    g = torch.Generator().manual_seed(settings["seed"])
    ids, lps = prompt_ids, []
    for _ in range(settings["max_new_tokens"]):
        lp = (model(ids)[0, -1] / settings["temperature"]).log_softmax(-1)
        tok = torch.multinomial(lp.exp(), 1, generator=g)
        lps.append(lp[tok])
        ids = torch.cat([ids, tok[None]], 1)
        if tok.item() == settings["eos_id"]:
            break
    return ids[0, prompt_ids.shape[1]:], torch.cat(lps)


if __name__ == "__main__":
    x = make(0)
    (a, la), (b, lb) = broken(**x), right(**x)
    print("broken", a.tolist(), la.sum().item())
    print("right ", b.tolist(), lb.sum().item())
    assert len(b) == len(a) + 1 and b[-1] == 0

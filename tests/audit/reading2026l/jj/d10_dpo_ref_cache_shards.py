"""Reference log-probabilities of rank 0 are attached to the rows of all ranks. Liquid4All/liquid-finetune#42 (upstream huggingface/trl#7084), https://github.com/Liquid4All/liquid-finetune/pull/42, 2026.
precompute_ref_log_probs assumes that every rank starts from the same data set, so one cache made by rank 0 is shared and looked up by row number. Ray workers hold different shards
with local row numbers; ranks other than 0 then train DPO with reference scores of foreign pairs. Shapes agree and nothing fails."""
import torch, torch.nn as nn
FAMILY = "preference losses"
KIND = "state"
INPUTS = {"ref_model": "frozen reference language model: ids [n, time] -> logits", "shards": "list over ranks; each entry is the rank's own part of the preference data, a dict with chosen, rejected (token ids, [rows, time]) and chosen_mask, rejected_mask (1 for completion tokens, not shifted); the shards hold different pairs and all have the same number of rows"}
SETTINGS = {}
NOTES = ("Precomputes the reference scores for DPO before training. Returns a list over ranks with a tensor [rows of the rank, 2]: row i holds the summed log-probabilities, under the frozen reference model, of the completion tokens of the chosen and of the rejected answer of row i of this rank's shard "
         "(logits at t-1 for the token at t). Row numbers are local to a shard: row i of one rank has nothing to do with row i of another. No gradient.")

class LM(nn.Module):
    def __init__(self, vocab=19, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    def shard(n=4, T=8):
        s = {}
        for k in ("chosen", "rejected"):
            s[k] = torch.randint(1, 19, (n, T))
            end = torch.randint(5, T + 1, (n, 1)); t = torch.arange(T)
            s[k + "_mask"] = ((t >= 3) & (t < end)).float()
        return s
    return {"ref_model": LM().requires_grad_(False), "shards": [shard() for _ in range(3)]}

@torch.no_grad()
def _score(model, shard):
    cols = []
    for k in ("chosen", "rejected"):
        lp = model(shard[k])[:, :-1].log_softmax(-1).gather(-1, shard[k][:, 1:, None]).squeeze(-1)
        cols.append((lp * shard[k + "_mask"][:, 1:]).sum(-1))
    return torch.stack(cols, -1)

def broken(ref_model, shards):
    cache = None
    out = []
    for rank, shard in enumerate(shards):
        if rank == 0:
            cache = _score(ref_model, shard)     # written by the main process, loaded by every rank
        rows = torch.arange(shard["chosen"].shape[0])
        out.append(cache[rows])
    return out

def right(ref_model, shards):
    out = []
    for rank, shard in enumerate(shards):
        cache = _score(ref_model, shard)         # one cache per rank
        rows = torch.arange(shard["chosen"].shape[0])
        out.append(cache[rows])
    return out

if __name__ == "__main__":
    d = make(0)
    b, r = broken(**d), right(**d)
    print("largest difference per rank", [(x - y).abs().max().item() for x, y in zip(b, r)]); assert (b[1] - r[1]).abs().max() > 0.1

"""Configured preference loss is not used. modelscope/ms-swift#10167, https://github.com/modelscope/ms-swift/pull/10167, 2026.
The Megatron trainer stored args.loss_type but called the shared dpo_loss without it; the function's default is sigmoid. Runs configured with hinge or ipo trained
with the sigmoid loss. For ipo the log-probabilities were also not divided by the number of completion tokens, as that loss is defined."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids; the first half of the rows are chosen, the second half the rejected answers of the same prompts, [2 * pairs, time]",
          "loss_mask": "1 on completion tokens, 0 on prompt and padding, [2 * pairs, time]", "ref_logps": "sum of the reference model's log-probabilities over the completion tokens, constants, [2 * pairs]"}
SETTINGS = {"beta": "0.1", "loss_type": "ipo"}
NOTES = ("Preference loss, mean over pairs. ipo: (margin - 1 / (2 beta)) squared, margin = difference of the policy-to-reference log-ratios of chosen and rejected, "
         "each log-probability averaged over its completion tokens.")


class LM(torch.nn.Module):
    """One causal self-attention layer with rotary positions, an MLP and a head. seg: [rows, time], tokens see only their own segment."""
    def __init__(self, vocab=32, width=24, heads=2):
        super().__init__()
        self.heads = heads
        self.emb = torch.nn.Embedding(vocab, width)
        self.n1, self.n2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def rope(self, x, pos):
        half = x.shape[-1] // 2
        freq = 100.0 ** (-torch.arange(half) / half)
        a = (pos[..., None] * freq)[:, None]
        u, v = x[..., :half], x[..., half:]
        return torch.cat([u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()], -1)

    def hidden(self, ids, pos=None, seg=None, allow=None):
        b, t = ids.shape
        pos = torch.arange(t).expand(b, t) if pos is None else pos
        x = self.emb(ids)
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t) if allow is None else allow
        if seg is not None:
            ok = ok & (seg[:, :, None] == seg[:, None, :])
        y = F.scaled_dot_product_attention(self.rope(q, pos), self.rope(k, pos), v, attn_mask=ok[:, None])
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.n2(x))

    def forward(self, ids, pos=None, seg=None, allow=None):
        return self.head(self.hidden(ids, pos, seg, allow))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 32, (6, 12))
    ids[3:, :4] = ids[:3, :4]
    mask = torch.zeros(6, 12)
    for i, n in enumerate((12, 9, 7, 8, 12, 10)):
        mask[i, 4:n] = 1
        ids[i, n:] = 0
    return {"model": LM(), "ids": ids, "loss_mask": mask, "ref_logps": -3.4 * mask.sum(1) + torch.randn(6)}


def sequence_logps(model, batch):
    lp = model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    return (lp * batch["loss_mask"][:, 1:]).sum(1)


def dpo_loss(policy, ref, beta, loss_type="sigmoid"):
    (pc, pr), (rc, rr) = policy.chunk(2), ref.chunk(2)
    margin = (pc - rc) - (pr - rr)
    if loss_type == "sigmoid":
        return -F.logsigmoid(beta * margin).mean()
    if loss_type == "hinge":
        return torch.relu(1 - beta * margin).mean()
    if loss_type == "ipo":
        return ((margin - 1 / (2 * beta)) ** 2).mean()
    raise ValueError(loss_type)


def broken(model, batch, beta=0.1, loss_type="ipo"):
    return dpo_loss(sequence_logps(model, batch), batch["ref_logps"], beta)


def right(model, batch, beta=0.1, loss_type="ipo"):
    policy, ref = sequence_logps(model, batch), batch["ref_logps"]
    if loss_type == "ipo":
        n = batch["loss_mask"][:, 1:].sum(1)
        policy, ref = policy / n, ref / n
    return dpo_loss(policy, ref, beta, loss_type=loss_type)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "with sigmoid both give", broken(m, b, loss_type="sigmoid").item(), right(m, b, loss_type="sigmoid").item())
    assert abs(broken(m, b).item() - right(m, b).item()) > 0.1

"""token-mean loss sums over tokens that are not trained. alibaba/ROLL#444, https://github.com/alibaba/ROLL/pull/444, 2026.
agg_loss in mode "token-mean" divided by the number of trained tokens but summed the whole matrix of token losses. Tool
observations, filtered tokens and padding have mask 0 and still changed the actor's loss and its gradient."""
import torch
from torch import nn

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "prompt, assistant turns and tool observations, [rows, time]", "response_mask": "1 where the policy wrote the token, 0 for prompt, tool output and padding, [rows, time]",
          "old_logprobs": "log-probabilities of ids[:, 1:] under the sampling policy, a constant, [rows, time-1]",
          "advantages": "one advantage per row, a constant, [rows]"}
SETTINGS = {"clip": "PPO clip, 0.2"}
NOTES = ("Clipped policy gradient; mean over all tokens of all rows that the policy wrote (token-mean). old_logprobs and "
         "advantages are constants. All parameters of the model are used.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    model, rows, time = TinyLM(), 4, 16
    ids = torch.randint(1, 32, (rows, time))
    mask = torch.zeros(rows, time)
    mask[:, 3:7] = 1        # first assistant turn
    mask[:, 10:14] = 1      # 7..9 is the tool's output; second assistant turn
    mask[1, 12:] = 0        # a shorter row
    ids[:, 14:] = 0
    ids[1, 12:] = 0
    with torch.no_grad():
        lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return {"model": model, "batch": {"ids": ids, "response_mask": mask, "old_logprobs": lp + 0.1 * torch.randn_like(lp),
                                      "advantages": torch.randn(rows)}}


def token_losses(model, batch, clip):
    logp = model(batch["ids"][:, :-1]).log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    ratio = (logp - batch["old_logprobs"]).exp()
    adv = batch["advantages"][:, None]
    return -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)


def broken(model, batch, clip=0.2):
    loss_mat, loss_mask = token_losses(model, batch, clip), batch["response_mask"][:, 1:]
    batch_num_tokens = loss_mask.sum()
    return loss_mat.sum() / batch_num_tokens


def right(model, batch, clip=0.2):
    loss_mat, loss_mask = token_losses(model, batch, clip), batch["response_mask"][:, 1:]
    batch_num_tokens = loss_mask.sum()
    return torch.where(loss_mask.bool(), loss_mat, torch.zeros_like(loss_mat)).sum() / batch_num_tokens


if __name__ == "__main__":
    out = []
    for f in (broken, right):
        d = make(0)
        loss = f(**d)
        loss.backward()
        out.append(loss.item())
        print(f.__name__, loss.item(), "gradient", d["model"].head.weight.grad.norm().item())
    assert abs(out[0] - out[1]) > 1e-3

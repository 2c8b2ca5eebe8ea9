"""Block loss mask read at the slot, not at the token it predicts. vllm-project/speculators#865, https://github.com/vllm-project/speculators/pull/865, 2026.
DSpark (sample_from_anchor) gates a draft slot by loss_mask at the position of the slot, although the slot at position i predicts token i+1.
At the end of each assistant turn one slot too many is trained (on the turn separator), always over-supervision."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [time]", "verifier_logits": "logits of the verifier, position i gives token i+1, [time, vocabulary]",
          "loss_mask": "1 where the token is of an assistant turn (a trained target), [time]", "anchors": "anchor positions, each with loss_mask 1 and anchor + block < time, [anchors]"}
SETTINGS = {"block": "draft slots per anchor, 4"}
NOTES = ("Distillation of a block drafter: slot j of anchor a stands at position a+j and predicts token a+j+1, target is the softmax of the verifier at position a+j. "
         "Cross entropy against soft targets, mean over the slots whose predicted token is trained. verifier_logits are constants. Every parameter is used.")
import torch
import torch.nn.functional as F
from torch import nn


class Drafter(nn.Module):
    def __init__(self, vocab=40, width=16, block=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.slot = nn.Embedding(block, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, anchor_ids):                       # [anchors] -> [anchors, block, vocabulary]
        x = self.embed(anchor_ids).unsqueeze(1) + self.slot.weight.unsqueeze(0)
        return self.head(torch.tanh(self.mix(x)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    time = 40
    mask = torch.zeros(time)
    mask[6:16] = 1
    mask[22:33] = 1
    legal = [p for p in range(time - 4) if mask[p]]
    pick = torch.randperm(len(legal), generator=g)[:10]
    return {"model": Drafter(), "ids": torch.randint(0, 40, (time,), generator=g), "verifier_logits": torch.randn(time, 40, generator=g) * 2,
            "loss_mask": mask, "anchors": torch.tensor(legal)[pick].sort().values}


def broken(model, batch, block=4):
    index = batch["anchors"].unsqueeze(1) + torch.arange(block)
    logits = model(batch["ids"][batch["anchors"]])
    target = batch["verifier_logits"][index].softmax(-1)
    mask = batch["loss_mask"][index]
    ce = -(target * F.log_softmax(logits, -1)).sum(-1)
    return (ce * mask).sum() / mask.sum()


def right(model, batch, block=4):
    index = batch["anchors"].unsqueeze(1) + torch.arange(block)
    logits = model(batch["ids"][batch["anchors"]])
    target = batch["verifier_logits"][index].softmax(-1)
    mask = batch["loss_mask"][index + 1]
    ce = -(target * F.log_softmax(logits, -1)).sum(-1)
    return (ce * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    b, r = broken(m, d), right(m, d)
    index = d["anchors"].unsqueeze(1) + torch.arange(4)
    print("broken", b.item(), "right", r.item(), "trained slots", d["loss_mask"][index].sum().item(), d["loss_mask"][index + 1].sum().item())
    assert abs(b - r) > 1e-4

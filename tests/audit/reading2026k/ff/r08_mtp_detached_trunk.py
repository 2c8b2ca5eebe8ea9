"""MTP whose loss reaches neither the trunk nor the shared embedding and head. Training an MTP head beside RL or SFT of a finished model
(slime/Megatron and verl `detach_encoder`, GLM-4.5 RL): hidden states, embedding and output matrix are detached in the MTP branch, so the
policy's gradient is unchanged and only the MTP layer learns. Looks as if the auxiliary loss were cut off from the model."""
import torch
import torch.nn.functional as F

FAMILY = "multimodal training, multi-token prediction, speculative drafters"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target, [rows, time]; column 0 is 0"}
SETTINGS = {"mtp_weight": "weight of the MTP loss, 0.2"}
NOTES = ("Next-token cross entropy, mean over trained tokens, plus mtp_weight times the cross entropy of the MTP layer that sees hidden state t and the embedding of token t+1 and predicts token t+2, mean over trained tokens t+2. "
         "In the MTP branch hidden states, embedding and output matrix are constants: the MTP loss trains only model.mtp, the main loss everything else. All parameters get a gradient.")


class Model(torch.nn.Module):
    def __init__(self, v=31, d=16):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.trunk = torch.nn.GRU(d, d, batch_first=True)
        self.out = torch.nn.Linear(d, v, bias=False)
        self.mtp = torch.nn.Linear(2 * d, d)


def make(seed):
    torch.manual_seed(seed)
    mask = torch.ones(4, 10)
    mask[:, 0] = 0
    mask[1, :5] = 0
    mask[2, 7:] = 0
    mask[3, :3] = 0
    return {"model": Model(), "ids": torch.randint(0, 31, (4, 10)), "loss_mask": mask}


def _ce(logits, target, w):
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (nll * w).sum() / w.sum()


def right(model, batch, mtp_weight=0.2):
    ids, mask = batch["ids"], batch["loss_mask"]
    h = model.trunk(model.emb(ids))[0]
    loss = _ce(model.out(h[:, :-1]), ids[:, 1:], mask[:, 1:])
    e = F.embedding(ids[:, 1:-1], model.emb.weight.detach())
    z = torch.tanh(model.mtp(torch.cat([h[:, :-2].detach(), e], -1)))
    return loss + mtp_weight * _ce(F.linear(z, model.out.weight.detach()), ids[:, 2:], mask[:, 2:])


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    loss.backward()
    h = m.trunk(m.emb(c["ids"]))[0]
    main, mtp, n1, n2 = 0.0, 0.0, 0, 0
    for i in range(4):
        for t in range(10):
            if t + 1 < 10 and c["loss_mask"][i, t + 1]:
                main, n1 = main - torch.log_softmax(m.out(h[i, t]), -1)[c["ids"][i, t + 1]], n1 + 1
            if t + 2 < 10 and c["loss_mask"][i, t + 2]:
                z = torch.tanh(m.mtp(torch.cat([h[i, t], m.emb(c["ids"][i, t + 1])])))
                mtp, n2 = mtp - torch.log_softmax(m.out(z), -1)[c["ids"][i, t + 2]], n2 + 1
    main, mtp = main / n1, mtp / n2
    rest = [m.emb.weight, m.out.weight, *m.trunk.parameters()]
    gm = torch.autograd.grad(main, rest, retain_graph=True)
    gt = torch.autograd.grad(0.2 * mtp, list(m.mtp.parameters()))
    d = max((p.grad - g).abs().max().item() for p, g in zip(rest + list(m.mtp.parameters()), gm + gt))
    print(loss.item(), (main + 0.2 * mtp).item(), "gradient difference", d)
    assert abs(loss.item() - (main + 0.2 * mtp).item()) < 1e-5 and d < 1e-6

"""Pure bf16 training with Kahan summation in the optimizer. Zamirai et al. 2020 (arXiv:2010.06192), optimi, torchdistx AnyPrecisionAdamW.
Parameters are bf16 and there is no fp32 copy. The part of an update that the rounding of the weight would lose is kept in a bf16 compensation buffer and added at the next step; so a weight can stand still for many steps
and then jump by one unit in the last place, more than that step's own update. Over several steps the weights follow the fp32 run."""
import torch
import torch.nn.functional as F

FAMILY = "adapters, merging and low precision"
KIND = "update"
INPUTS = {"model": "tiny language model (ids -> logits) in bf16", "optimizer": "KahanSGD over its parameters, lr 0.003, momentum 0",
          "batches": "a list of dicts with ids [rows, time], one optimizer step each"}
SETTINGS = {}
NOTES = ("one optimizer step per batch, in order; loss = mean next-token cross-entropy with the log-softmax in fp32; parameters, gradients and compensation in bf16. After the call weight + compensation equals the fp32 SGD result up to bf16 noise of the gradients; "
         "a single step may leave most weights unchanged. No clipping, no weight decay.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                comp = self.state[p].setdefault("compensation", torch.zeros_like(p))
                comp.add_(p.grad, alpha=-group["lr"])
                old = p.detach().clone()
                p.add_(comp)
                comp.add_(old.sub_(p))


def make(seed):
    torch.manual_seed(seed)
    model = Tiny().to(torch.bfloat16)
    data = torch.randint(0, 32, (6, 9))
    return {"model": model, "optimizer": KahanSGD(model.parameters(), lr=0.003), "batches": [{"ids": data[i % 3 * 2:i % 3 * 2 + 2]} for i in range(60)]}


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def right(model, optimizer, batches):
    for b in batches:
        optimizer.zero_grad()
        loss_of(model(b["ids"]), b["ids"]).backward()
        optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    vec = lambda m: torch.cat([p.detach().float().flatten().clone() for p in m.parameters()])
    results = {}
    start = vec(make(0)["model"])
    for name in ("fp32", "bf16 without compensation", "kahan"):
        case = make(0)
        if name != "kahan":
            if name == "fp32":
                case["model"].float()
            case["optimizer"] = torch.optim.SGD(case["model"].parameters(), lr=0.003)
        right(**case)
        results[name] = vec(case["model"]) - start
        if name == "kahan":
            comp = torch.cat([case["optimizer"].state[p]["compensation"].float().flatten() for p in case["model"].parameters()])
    for name, v in results.items():
        print(name, "length", v.norm().item(), "cosine with fp32", torch.cosine_similarity(v, results["fp32"], 0).item())
    err = ((results["kahan"] + comp) - results["fp32"]).norm() / results["fp32"].norm()
    print("weight + compensation against fp32", err.item())
    assert err < 0.05

"""Sign compression with error feedback: ranks send sign times mean magnitude and keep what they did not send.
The residual (which is never zeroed, also not between epochs) is added before the next compression, so that the compressed updates sum to the real ones (EF-signSGD, Karimireddy et al. 2019)."""
FAMILY = "update compression"
KIND = "update"
INPUTS = {"model": "linear regression float64", "optimizer": "dict with residual: list over ranks of lists of tensors, mutated", "batches": "list of steps, each a list over ranks of dict x,y"}
SETTINGS = {"lr": "0.05"}
NOTES = "One step per element of batches. The learning rate is applied BEFORE the compression, so the residual is in weight units and a changed lr does not rescale it. Mean over rows then over ranks."
import torch, torch.nn as nn, copy

def make(seed, world=2):
    torch.manual_seed(seed); m = nn.Linear(6, 1).double()
    w = torch.randn(6).double()
    def b():
        x = torch.randn(8, 6).double(); return {"x": x, "y": x @ w}
    return {"model": m, "optimizer": {"residual": [[torch.zeros_like(p) for p in m.parameters()] for _ in range(world)]},
            "batches": [[b() for _ in range(world)] for _ in range(60)]}

def right(model, optimizer, batches, lr=0.05):
    params = list(model.parameters())
    for step in batches:
        update = [torch.zeros_like(p) for p in params]
        for r, b in enumerate(step):
            g = torch.autograd.grad(((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean(), params)
            for i, x in enumerate(g):
                want = optimizer["residual"][r][i] + lr * x
                sent = want.abs().mean() * want.sign()
                optimizer["residual"][r][i] = want - sent
                update[i] += sent / len(step)
        with torch.no_grad():
            for p, u in zip(params, update): p.sub_(u)

if __name__ == "__main__":
    d = make(0); m = d["model"]; start = copy.deepcopy(m); tw = copy.deepcopy(m)
    L = lambda: sum(((m(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().item() for b in d["batches"][0])
    l0 = L(); total = [torch.zeros_like(p) for p in m.parameters()]
    for s in d["batches"]:
        for b in s:
            g = torch.autograd.grad(((m(b["x"]).squeeze(-1) - b["y"]) ** 2).mean(), list(m.parameters()))
            for t, x in zip(total, g): t += 0.05 * x / 2
        right(m, d["optimizer"], [s])
    for i, (p, q) in enumerate(zip(m.parameters(), start.parameters())):
        res = sum(d["optimizer"]["residual"][r][i] for r in range(2)) / 2
        assert torch.allclose(q - p + res, total[i])          # moved + unsent = sum of the real updates
    print("loss", l0, "->", L(), "conservation holds"); assert L() < 0.05 * l0

"""ActNorm with data-dependent initialisation (Glow, Kingma & Dhariwal 2018; Salimans & Kingma 2016): the first training forward WRITES the parameters from its batch, in place and without a
gradient, so a forward pass changes the weights. Whether it happened is a saved buffer, not a Python flag: a loaded model must not initialise again."""
import torch

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"width": "channels", "first": "first batch, [rows, width]; at least 2 rows with spread in each channel", "later": "another batch, [rows, width]"}
SETTINGS = {"eps": "added to the std, 1e-6"}
NOTES = ("right(width) makes the module: forward(x) -> (y, logdet per row), y = (x + bias) * exp(log_scale). After the first training forward y has mean 0 and std 1 (biased) per channel; from then on bias and log_scale are ordinary "
         "parameters, trained by gradients (also in the first step, gradient through the written values). In eval before any training batch the layer refuses to run. `initialized` is a buffer in state_dict. "
         "The result depends on the first batch by design, afterwards rows are independent (no batch statistics). With several ranks rank 0's values must be broadcast (not shown).")


class ActNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.bias = torch.nn.Parameter(torch.zeros(width))
        self.log_scale = torch.nn.Parameter(torch.zeros(width))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if not self.initialized:
            if not self.training:
                raise RuntimeError("ActNorm has seen no training batch")
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.log_scale.copy_(-(x.std(0, unbiased=False) + self.eps).log())
                self.initialized.fill_(True)
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum().expand(x.shape[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    scale, shift = torch.rand(6, generator=g) * 5 + 0.5, torch.randn(6, generator=g) * 3
    return {"width": 6, "first": torch.randn(32, 6, generator=g) * scale + shift, "later": torch.randn(8, 6, generator=g) * scale + shift}


def right(width, eps=1e-6):
    return ActNorm(width, eps)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        layer = right(d["width"])
        try:
            layer.eval()(d["first"])
            raise SystemExit("must refuse")
        except RuntimeError:
            pass
        layer.train()
        y, logdet = layer(d["first"])
        m, s = y.mean(0).abs().max().item(), (y.std(0, unbiased=False) - 1).abs().max().item()
        jac = torch.autograd.functional.jacobian(lambda v: layer(v[None])[0][0], d["first"][0])
        det = (torch.linalg.slogdet(jac)[1] - logdet[0]).abs().item()
        loss = (y ** 2).sum(1).mul(0.5).sub(logdet).mean()                 # the flow's negative log likelihood
        loss.backward()
        # at the initial values the Gaussian likelihood is already optimal per channel: gradients are almost 0; on other data they are not
        at_first = max(p.grad.abs().max().item() for p in layer.parameters())
        layer.zero_grad()
        y2, ld2 = layer(d["later"])
        ((y2 ** 2).sum(1).mul(0.5) - ld2).mean().backward()
        at_later = min(p.grad.abs().max().item() for p in layer.parameters())
        saved = {k: v.clone() for k, v in layer.state_dict().items()}
        fresh = right(d["width"])
        fresh.load_state_dict(saved)
        same = torch.equal(fresh.train()(d["later"])[0], y2) and torch.equal(fresh.bias, layer.bias)
        loop = max(abs((d["later"][i, c].item() - d["first"][:, c].mean().item()) / (d["first"][:, c].std(unbiased=False).item() + 1e-6) - y2[i, c].item()) for i in range(8) for c in range(6))
        print(f"mean {m:.1e} std error {s:.1e} logdet error {det:.1e} grad first {at_first:.1e} later {at_later:.2f} loop {loop:.1e} not initialised again {same}")
        assert m < 1e-5 and s < 1e-4 and det < 1e-4 and at_later > 1e-3 and same and loop < 1e-4

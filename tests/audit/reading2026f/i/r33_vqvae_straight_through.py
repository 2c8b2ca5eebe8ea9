"""VQ-VAE (van den Oord et al. 2017). Two squared errors of the SAME pair with detach on opposite sides (codebook and commitment), and the decoder sees
z + (q - z).detach(): forward it is q, backward it is the identity into the encoder."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"x": "real vectors, [rows, 6]"}
SETTINGS = {"commit": "commitment weight, 0.25"}
NOTES = "Mean over all entries (rows times width). A codebook row that no example chooses gets zero gradient (not None). The two quadratic terms have the same value, so the loss shows 1.25 times the distance. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class VQ(nn.Module):
    def __init__(self, d=6, k=4, codes=8):
        super().__init__()
        self.enc, self.dec, self.codes = nn.Linear(d, k), nn.Linear(k, d), nn.Embedding(codes, k)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    return {"model": VQ(), "x": torch.randn(12, 6, generator=g)}


def right(model, batch, commit=0.25):
    x = batch["x"]
    z = model.enc(x)
    q = model.codes(torch.cdist(z.detach(), model.codes.weight.detach()).argmin(-1))
    recon = F.mse_loss(model.dec(z + (q - z).detach()), x)
    return recon + F.mse_loss(q, z.detach()) + commit * F.mse_loss(z, q.detach()), {"recon": recon.item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); slow = 0.0
    with torch.no_grad():
        for v in d["x"]:
            z = model.enc(v)
            q = min(model.codes.weight, key=lambda c: float((c - z).square().sum()))
            slow += float((model.dec(q) - v).square().mean() + 1.25 * (q - z).square().mean()) / 12
    check(right(model, d)[0], slow, model)

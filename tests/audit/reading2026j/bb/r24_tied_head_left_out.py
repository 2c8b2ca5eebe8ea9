"""A checkpoint that leaves out the output head, because it is the embedding (safetensors refuses shared storage; Hugging Face _tied_weights_keys, T5/GPT-2). Loading reports a
missing key, accepted only if it is exactly the tied one, and ties again AFTER loading. A load into a wrongly untied copy would train two different matrices."""
import io
import torch
import torch.nn.functional as F

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"model": "tiny language model with head.weight tied to emb.weight"}
SETTINGS = {}
NOTES = ("right(model) saves and loads: returns a fresh model from the saved bytes; save() and load() are the halves. strict=False is used, but missing keys other than the tied one and any unexpected key are errors. "
         "The file has one tensor fewer than model.state_dict(). After loading head.weight IS emb.weight (one Parameter, counted once by parameters()), so an optimizer must be made after loading. Float32, exact.")

TIED = {"head.weight": "emb.weight"}


class LM(torch.nn.Module):
    def __init__(self, vocab=17, width=8):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mix = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.emb(ids).cumsum(1))))


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM()}


def save(model):
    state = {k: v for k, v in model.state_dict().items() if k not in TIED}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load(data):
    state = torch.load(io.BytesIO(data), weights_only=True)
    model = LM()
    model.head.weight = torch.nn.Parameter(torch.empty_like(model.head.weight))   # as if built empty (meta device): not tied yet
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) != set(TIED) or unexpected:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    model.tie()
    return model


def right(model):
    return load(save(model))


if __name__ == "__main__":
    for seed in range(3):
        model = make(seed)["model"]
        ids = torch.randint(0, 17, (3, 7))
        opt = torch.optim.SGD(model.parameters(), lr=0.3)
        for m_seed in range(2):
            opt.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            opt.step()
        copy = right(model)
        assert copy.head.weight is copy.emb.weight and len(list(copy.parameters())) == len(list(model.parameters())) == 3
        assert torch.equal(copy(ids), model(ids)) and copy.emb.weight is not model.emb.weight
        grads = []
        for m in (model, copy):                                            # one more step on both: still equal
            o = torch.optim.SGD(m.parameters(), lr=0.3)
            o.zero_grad()
            F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            grads.append(m.emb.weight.grad.abs().sum().item())
            o.step()
        print("gradient of the shared matrix", grads, "difference after a step", (copy(ids) - model(ids)).abs().max().item())
        assert torch.equal(copy(ids), model(ids)) and grads[0] > 0
    broken = torch.load(io.BytesIO(save(model)), weights_only=True)
    del broken["mix.bias"]
    b = io.BytesIO()
    torch.save(broken, b)
    try:
        load(b.getvalue())
        raise SystemExit("must not load")
    except RuntimeError as e:
        print("refused:", e)

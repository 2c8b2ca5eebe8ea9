"""ETD follow-on trace uses the current step's ratio. SlopDotCash/asi#1975, https://github.com/SlopDotCash/asi/pull/1975, 2026
(issue SlopDotCash/asi#1974). Emphatic TD(lambda) keeps two traces with two time indices of the importance ratio: the
eligibility trace takes rho_t, the follow-on trace rho_{t-1}. The code put rho_t into both, so that an action off the support of
the target policy erases the emphasis that the history gave to the present state."""
import copy
import torch
import torch.nn as nn

FAMILY = "replay and off-policy corrections"
KIND = "update"
INPUTS = {
    "model": "linear value function phi -> V, no bias",
    "optimizer": "torch SGD over the model",
    "batches": "transitions of one behaviour trajectory in order; each a dict: phi [d], phi_next [d], reward (float), rho = pi(a|s)/mu(a|s) of the action of this transition, "
               "gamma = discount of the state phi, gamma_next = discount of the state phi_next, interest (float)",
}
SETTINGS = {"lam": "trace decay, 0.7"}
NOTES = ("Emphatic TD(lambda) of Sutton, Mahmood and White (2016), linear, one step of the optimizer per transition. "
         "Follow-on trace F_t = rho_{t-1} * gamma_t * F_{t-1} + i_t: it depends on the history up to the state S_t only, not on the action that is about to be taken there; rho before the first transition is 1 and F starts at 0. "
         "Emphasis M_t = lam * i_t + (1 - lam) * F_t. Eligibility e_t = rho_t * (gamma_t * lam * e_{t-1} + M_t * phi_t), e starts at 0. "
         "delta_t = r + gamma_next * V(phi_next) - V(phi) with the present weights; the update adds lr * delta_t * e_t (semi-gradient: nothing flows through V(phi_next)). "
         "Order of the transitions matters. All parameters are used.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Linear(5, 1, bias=False)
    phis = torch.rand(13, 5, generator=g)
    rhos = torch.tensor([1.3, 0.0, 1.8, 0.6, 1.8, 0.0, 1.8, 1.8, 0.6, 0.0, 1.8, 1.3])
    batches = [{"phi": phis[t], "phi_next": phis[t + 1], "reward": float(torch.randn((), generator=g)), "rho": float(rhos[t]),
                "gamma": 0.9, "gamma_next": 0.9, "interest": 1.0} for t in range(12)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.02), "batches": batches}


def _step(model, optimizer, tr, e):
    with torch.no_grad():
        delta = tr["reward"] + tr["gamma_next"] * model(tr["phi_next"]) - model(tr["phi"])
    optimizer.zero_grad()
    model.weight.grad = -(delta * e).reshape(1, -1)
    optimizer.step()


def broken(model, optimizer, batches, lam=0.7):
    F, e = 0.0, torch.zeros_like(batches[0]["phi"])
    for tr in batches:
        rho = tr["rho"]
        F = rho * tr["gamma"] * F + tr["interest"]
        M = lam * tr["interest"] + (1 - lam) * F
        e = rho * (tr["gamma"] * lam * e + M * tr["phi"])
        _step(model, optimizer, tr, e)


def right(model, optimizer, batches, lam=0.7):
    F, e, prev_rho = 0.0, torch.zeros_like(batches[0]["phi"]), 1.0
    for tr in batches:
        rho = tr["rho"]
        F = prev_rho * tr["gamma"] * F + tr["interest"]
        M = lam * tr["interest"] + (1 - lam) * F
        e = rho * (tr["gamma"] * lam * e + M * tr["phi"])
        _step(model, optimizer, tr, e)
        prev_rho = rho


if __name__ == "__main__":
    out = []
    for f in (broken, right):
        m = make(0); f(**m); out.append(m["model"].weight.detach().clone()); print(f.__name__, out[-1])
    assert (out[0] - out[1]).abs().max() > 1e-3

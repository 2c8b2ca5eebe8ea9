"""What all replicas agree on: the global weights and the outer optimizer's state, in fragments.

Round k moves fragment k mod F and no other. torchft takes each outer step on the live weights; this module takes the
same step on a copy, with the same ``torch.optim`` class. So a commit can name the fingerprint of the state that it
leads to, and a late replica can replay the rounds after an old state from the deltas alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from earnest.diloco.errors import RoundStuck
from earnest.diloco.ledger import Commit, Ledger
from earnest.diloco.protocol import average, digest
from earnest.diloco.wire import FlatVector, decode
from earnest.store import Damaged


@dataclass(frozen=True)
class OuterSGD:
    """SGD with Nesterov momentum on pseudo-gradients (2311.08105); torch's own class is built from it. Over several
    rounds the weights move by lr / (1 - momentum) times the replicas' average progress. The paper's 0.7 and 0.9 (a
    factor of 7, for 500 inner steps of pretraining) undo RL where a round has few or noisy updates; lr 1 without
    momentum takes the average."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def build(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(list(parameters), lr=self.lr, momentum=self.momentum, nesterov=nesterov)


class Fragment:
    """Some of the weights, flat and on the CPU; ``outer`` None: the average replaces them (LocalSGD)."""

    def __init__(self, tensors: Sequence[Tensor], outer: OuterSGD | None) -> None:
        self.weights = [nn.Parameter(t.detach().float().cpu().clone()) for t in tensors]
        self.optimizer = outer.build(self.weights) if outer else None

    @property
    def n(self) -> int:
        return sum(w.numel() for w in self.weights)

    def flat(self) -> FlatVector:
        return torch.cat([w.detach().reshape(-1) for w in self.weights]) if self.weights else torch.zeros(0)

    def apply(self, mean: FlatVector) -> None:
        """One outer step along the average difference, or, without an optimizer, to the average weights."""
        for weight, part in zip(self.weights, split(mean, self.weights), strict=True):
            if self.optimizer is None:
                weight.data.copy_(part)
            else:
                weight.grad = part.clone()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def momentum(self) -> list[Tensor | None]:
        if self.optimizer is None:
            return [None] * len(self.weights)
        return [self.optimizer.state[w].get("momentum_buffer") for w in self.weights]

    def tensors(self) -> dict[str, Tensor]:
        found = {f"weight.{i}": w.detach() for i, w in enumerate(self.weights)}
        return found | {f"momentum.{i}": m for i, m in enumerate(self.momentum()) if m is not None}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for i, weight in enumerate(self.weights):
            if f"weight.{i}" not in tensors or tensors[f"weight.{i}"].shape != weight.shape:
                raise Damaged(f"the state's weight {i} is missing or has another shape; is it from the same adapter?")
            weight.data.copy_(tensors[f"weight.{i}"])
            if self.optimizer is not None:
                held = tensors.get(f"momentum.{i}")
                self.optimizer.state[weight] = {} if held is None else {"momentum_buffer": held.clone()}

    def digest(self) -> str:
        tensors = self.tensors()
        return digest([tensors[name] for name in sorted(tensors)])


class Globals:
    """The fragments, and the number of rounds that led to them."""

    def __init__(
        self, fragments: Sequence[Sequence[Tensor]], outer: OuterSGD | None, max_norm: float | None = None
    ) -> None:
        self.fragments = [Fragment(f, outer) for f in fragments]
        self.max_norm = max_norm
        self.round = 0
        self._digests = [f.digest() for f in self.fragments]
        self._ahead: tuple[int, FlatVector, Fragment, str] | None = None

    @property
    def current(self) -> Fragment:
        """The fragment that the next round moves."""
        return self.fragments[self.round % len(self.fragments)]

    def fingerprint(self) -> str:
        return self.chain(self._digests)

    @staticmethod
    def chain(digests: Sequence[str]) -> str:
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def outcome(self, mean: FlatVector) -> str:
        """The fingerprint after a round with this average; nothing moves. ``advance`` with the same
        average then reuses the result."""
        ahead = copy.deepcopy(self.current)
        ahead.apply(mean)
        digests = list(self._digests)
        digests[self.round % len(digests)] = found = ahead.digest()
        self._ahead = (self.round, mean, ahead, found)
        return self.chain(digests)

    def advance(self, mean: FlatVector) -> None:
        index, known = self.round % len(self.fragments), self._ahead
        self._ahead = None
        if known is not None and known[0] == self.round and known[1] is mean:
            self.fragments[index], self._digests[index] = known[2:]
        else:
            self.fragments[index].apply(mean)
            self._digests[index] = self.fragments[index].digest()
        self.round += 1

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": t for i, f in enumerate(self.fragments) for name, t in f.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor], at: int) -> None:
        for i, fragment in enumerate(self.fragments):
            own = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == str(i)}
            fragment.load(own)
        self.round, self._ahead = at, None
        self._digests = [f.digest() for f in self.fragments]

    def pack(self) -> bytes:
        from safetensors.torch import save

        return save({k: v.contiguous().clone() for k, v in self.tensors().items()}, {"round": str(self.round)})

    def unpack(self, payload: bytes, at: int) -> None:
        from safetensors.torch import load

        self.load(load(payload), at)

    def recover(self, ledger: Ledger) -> None:
        """Become the newest committed state: the newest readable snapshot, then the commits after it, one by one. If
        another replica removes old objects meanwhile, a newer snapshot exists, and the replay starts from that."""
        while True:
            self._begin(ledger)
            try:
                while (commit := ledger.commit(self.round)) is not None:
                    self._replay(ledger, commit)
                return
            except Damaged as error:
                if max(ledger.states(), default=-1) <= self.round:
                    raise RoundStuck(
                        f"round {self.round} is committed, but cannot be replayed ({error}), and there is no later "
                        "state. Restore that object, or start one of the replicas that had finished the round."
                    ) from None

    def _replay(self, ledger: Ledger, commit: Commit) -> None:
        vectors = []
        whose = list(zip(commit.members, commit.attempts, strict=True))
        for (replica, _), found in zip(whose, ledger.deltas(self.round, whose), strict=True):
            if found is None:
                raise Damaged(f"the delta of replica {replica} is gone")
            if isinstance(found, Damaged):
                raise found
            vectors.append(decode(found.payload, self.current.n, found.key))
        mean = average(vectors, commit.tokens, self.max_norm)
        if self.outcome(mean) != commit.result:
            raise Damaged(f"its deltas do not give {commit.result[:12]} here; is it another version of torch?")
        self.advance(mean)

    def _begin(self, ledger: Ledger) -> None:
        reasons: list[str] = []
        for k in reversed(ledger.states()):
            try:
                found = ledger.state(k)
                if found is None:
                    continue
                self.unpack(found.payload, k)
                if self.fingerprint() != found.meta["fingerprint"]:
                    raise Damaged(f"{found.key} does not have the weights that it claims")
            except Damaged as error:
                reasons.append(str(error))
                continue
            return
        raise Damaged(f"there is no readable state in {ledger.bucket.url}: {'; '.join(reasons) or 'none was written'}")


def split(flat: FlatVector, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]

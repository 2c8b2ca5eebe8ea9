"""``infer(model, loss, batch)`` guesses the roles of a step's tensors by perturbation; names are not used.

Each tensor of the batch is changed by itself, and the effect determines its role:

    ids, attention         the model's layers compute something else; whole numbers, or zeros and ones
    positions, documents   … and along a row the whole numbers count up by one, or stay and rise
    labels, mask           the layers compute the same and the gradient changes; whole numbers, or zeros and ones
    advantages             gradient and loss are linear in it, and it has both signs
    rewards                a constant added to all of it changes nothing
    behaviour              it matters, and no longer does where the advantages are 0 (or the rewards are equal)
    reference              … and still does there
    returns                the gradient is linear in it and the loss is quadratic
    teacher                a distribution for each token
    chosen, rejected       two tensors of ids, one of which a step along -gradient makes more likely and the other less
    reference_chosen, …    one number for each pair: raising it raises the loss, or lowers it

A guess is "sure" or "likely"; a verdict lists all of them, and the tensors for which there is none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from earnest_audit.edits import SIDES, Batch, next_of
from earnest_audit.errors import Undeclared
from earnest_audit.frontends.layout import check_batch, editable, rows_elsewhere
from earnest_audit.measure import Reading
from earnest_audit.precision import is_coarse
from earnest_audit.probe import Probe
from earnest_audit.restore import observed
from earnest_audit.step import Step, check_fields

Sureness = Literal["sure", "likely"]
TINY = 1e-6  # relative changes of the gradient up to this count as none
CLOSE = 1e-3  # gradients this close count as equal
ROUGH = 0.05  # … in 16 bits
IGNORED = (-100, -1)  # labels that mark what is not supervised: torch's default, and nanochat's


@dataclass(frozen=True)
class Guess:
    """A tensor of the batch, its guessed role, the confidence of the guess, and the observation behind it."""

    key: str
    role: str
    sure: Sureness
    why: str

    def __str__(self) -> str:
        return f"{self.key} is {self.role} ({self.sure}: {self.why})"


@dataclass
class InferredStep(Step):
    """A step whose roles were guessed."""

    inferred: tuple[Guess, ...] = ()
    marks_none: bool = False  # the labels were guessed, and no label is known to take a place out of the loss
    rows_elsewhere: bool = False

    @property
    def ignored(self) -> int | None:
        if not self.marks_none:
            return self.ignore_index
        if "mask" in self.roles:
            return None
        raise Undeclared("ignore_index=-100 (or another label that the loss ignores)")

    @property
    def remarks(self) -> tuple[str, ...]:
        """The lines that the verdict adds to its notes."""
        known = {guess.key for guess in self.inferred} | set(self.roles.values())
        left = {k: v for k, v in self.batch.items() if isinstance(v, Tensor) and k not in known}
        marked = [k for k, v in left.items() if editable(v) and v.ndim == 2 and bool((v == IGNORED[0]).any())]
        used = [f"guessed: {guess}" for guess in self.inferred]
        none = [f"no role was found for {', '.join(map(str, left))}"] if left else []
        if marked and "labels" not in self.roles:
            none.append(f"{marked[0]} has entries of {IGNORED[0]}: roles={{'labels': {marked[0]!r}}} declares it")
        elif self.rows_elsewhere:
            none.append("no role was guessed, because the rows are not in the first dimension of every tensor")
        free = {k: v for k, v in numbers_of(self.loss).items() if k not in self.knobs}
        offered = [f"the loss has settings that are not declared: settings={free} declares them"] if free else []
        way_out = ["Step(…, roles={role: key}) declares roles instead of guessing them"] if used else []
        return (*used, *none, *offered, *way_out)


def infer(model: nn.Module, loss: Callable[..., Any], batch: Mapping[str, Any], **declared: Any) -> InferredStep:
    """The step of ``loss(model, batch, **settings)`` with guessed roles. ``declared`` are further fields of ``Step``;
    declared roles are not guessed."""
    check_fields(declared)
    given = declared.pop("roles", {})
    check_batch(batch)
    declared = dict.fromkeys(["all_supervised", *([] if given else ["rows_interact", "pairwise"])]) | declared
    base = Step(model=model, loss=loss, batch=batch, roles=given, **declared)
    found, elsewhere = list[Guess](), False
    if base.trainable():  # else law GL fails, and roles do not matter
        probe = Probe(base)
        with probe.open():
            elsewhere = not given and rows_elsewhere(probe)
            found = [] if elsewhere else _Inference(probe, given).run()
    roles = dict(given) | {guess.role: guess.key for guess in found}
    ignored = ignored_label(batch[roles["labels"]]) if "labels" in roles else None
    marks_none = "labels" in roles.keys() - given.keys() and ignored is None and "ignore_index" not in declared
    if ignored is not None:
        declared.setdefault("ignore_index", ignored)
    return InferredStep(
        model=model, loss=loss, batch=batch, roles=roles, inferred=tuple(found), marks_none=marks_none,
        rows_elsewhere=elsewhere, **declared,
    )  # fmt: skip


def numbers_of(loss: Callable[..., Any]) -> dict[str, float]:
    """The parameters of the loss after (model, batch) that have a number as their default."""
    try:
        named = list(inspect.signature(loss).parameters.values())[2:]
    except (TypeError, ValueError):  # no signature is known
        return {}
    return {p.name: p.default for p in named if type(p.default) in (int, float)}


class _Inference:
    """The guesses for one batch. Later guesses depend on earlier ones."""

    def __init__(self, probe: Probe, given: Mapping[str, str]) -> None:
        self.probe, self.batch = probe, dict(probe.step.batch)
        self.given, self.guesses = given, list[Guess]()
        self.base, self.layers = self._seen(self.batch)
        self.close = ROUGH if any(map(is_coarse, probe.parameters.values())) else CLOSE
        self.calls: dict[str, frozenset[int]] = {}  # of tensors that matter: the layers' calls that depend on them
        self.unclear = False  # several tensors of ids, and no pair of answers

    def run(self) -> list[Guess]:
        declared = set(self.given.values())
        tensors = {k: v for k, v in self.batch.items() if isinstance(v, Tensor) and editable(v) and k not in declared}
        for key, tensor in tensors.items():
            change, calls = self._effect(key, tensor)
            if change > TINY or calls:
                self.calls[key] = calls
        live = list(self.calls)
        binary = [k for k in live if _is_binary(tensors[k]) and tensors[k].ndim == 2]
        whole = [k for k in live if k not in binary and not tensors[k].is_floating_point()]
        rows = [k for k in whole if tensors[k].ndim == 1]
        numbers = [k for k in live if k not in binary and tensors[k].is_floating_point()]
        self._tokens([k for k in whole if tensors[k].ndim == 2])
        self._masks(binary)
        if "chosen" in self.roles:
            for key in (*rows, *numbers):
                self._pair_number(key)
        else:
            self._rows(rows)
            self._numbers(numbers)
        return self.guesses

    def _seen(self, batch: Batch) -> tuple[Reading, list[float]]:
        """The reading of a batch, and a number for each call of a layer that has parameters of its own."""
        with _listening(self.probe.step.model) as layers:
            reading = self.probe.read(batch)
        return reading, layers

    def _effect(self, key: str, tensor: Tensor) -> tuple[float, frozenset[int]]:
        """The effect of changing one tensor: on the gradient, and on which calls of the model's layers; of the first
        change that has any and at which the step does not raise."""
        for edited in _edits(tensor):
            with suppress(Exception):
                reading, layers = self._seen({**self.batch, key: edited})
                moved = frozenset(i for i, (a, b) in enumerate(zip(layers, self.layers, strict=False)) if a != b)
                if (change := self.base.gradient.distance(reading.gradient)) > TINY or moved:
                    return change, moved
        return 0.0, frozenset()

    def _with(self, changed: Mapping[str, Tensor]) -> Reading:
        return self.probe.read({**self.batch, **changed})

    def _moves(self, changed: Mapping[str, Tensor]) -> float:
        """The effect of these changes on the gradient."""
        return self._with(changed).gradient.distance(self.base.gradient)

    def _add(self, key: str, role: str, sure: Sureness, why: str) -> None:
        """Add a guess, unless another tensor has the role already."""
        if role not in self.roles:
            self.guesses.append(Guess(key, role, sure, why))

    @property
    def roles(self) -> dict[str, str]:
        """The roles that are known up to now, declared or guessed."""
        return {guess.role: guess.key for guess in self.guesses} | dict(self.given)

    def _tokens(self, keys: Sequence[str]) -> None:
        ids, labels = list[str](), list[str]()
        for key in keys:
            tensor, calls = self.batch[key], self.calls[key]
            steps = tensor[:, 1:] - tensor[:, :-1]
            counting = bool(((steps == 1) | (tensor[:, 1:] == 0)).float().mean() > 0.9) and bool((steps == 1).any())
            staying = bool(((steps == 0) | (steps == 1)).all()) and len(tensor.unique()) < tensor.shape[1] // 2 + 1
            if calls and counting:
                self._add(key, "positions", "likely", "the layers read it, and it counts up along a row")
            elif staying:
                self._add(key, "documents", "likely", "it stays or rises by one along a row")
            elif calls:
                ids.append(key)
            else:
                labels.append(key)
        for key in labels:
            ignored = ignored_label(self.batch[key])
            if ignored is not None and self._takes_out(key, ignored):
                sure: Sureness = "sure" if ignored == IGNORED[0] else "likely"
                self._add(key, "labels", sure, f"only the loss reads it; {ignored} marks what is not supervised")
            elif ignored is None and any(self.batch[k].shape == self.batch[key].shape for k in ids):
                self._add(key, "labels", "likely", "whole numbers like the ids, which only the loss reads")
        if len(ids) == 1:
            self._add(ids[0], "ids", "sure", "whole numbers that the layers read")
        # A step along -gradient makes the chosen answers more likely and the rejected ones less.
        sides = [self._raised(key) for key in ids] if len(ids) == 2 else []
        self.unclear = len(ids) > 1 and set(sides) != {True, False}
        for key, up in zip(ids, sides, strict=True) if set(sides) == {True, False} else ():
            role, way = ("chosen", "more") if up else ("rejected", "less")
            against = ", against its name: is the sign of the loss right?" if _named_otherwise(key, role) else ""
            self._add(key, role, "sure", f"a step along the negative gradient makes it {way} likely{against}")

    def _raised(self, key: str) -> bool | None:
        """Whether descending the loss raises the likelihood of these tokens; None if there are no logits."""
        ids = self.batch[key]
        mask = self.batch[key] != 0
        try:
            with torch.enable_grad():
                found = self.probe.step.model(ids)
                logits = getattr(found, "logits", found)
                lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                slope = self.probe.pull((lp * mask[:, 1:]).sum()).dot(self.base.gradient)
        except Exception:
            return None
        return slope < 0 if slope else None

    def _rows(self, keys: Sequence[str]) -> None:
        for key in keys:
            numbers, places = self.batch[key].unique(return_inverse=True)
            if self._moves({key: numbers.flip(0)[places]}) <= self.close:
                self._add(key, "group", "likely", "a whole number for each row; other numbers change nothing")
            elif _is_binary(numbers) and "ids" in self.roles:
                self._add(key, "correct", "likely", "true or false for each row")

    def _takes_out(self, key: str, off: int) -> bool:
        """Whether this value takes places out of the loss: where all have it, little is left, 0/0, or the same gradient
        over another count. A target of 0 (a class that is not there) teaches as much as one of 1."""
        try:
            left = self._with({key: torch.full_like(self.batch[key], off)}).gradient
        except Exception:
            return True
        usual = self.base.gradient
        if not left.finite() or left.norm() <= 0.5 * usual.norm():
            return True
        return left.distance(usual.times(left.best_scale(usual))) <= ROUGH

    def _masks(self, keys: Sequence[str]) -> None:
        sides, both = {role: key for role, key in self.roles.items() if role in SIDES}, list[str]()
        for key in [] if self.unclear else keys:
            calls = self.calls[key]
            kind, reader = ("attention", "the layers read") if calls else ("mask", "only the loss reads")
            why = f"zeros and ones that {reader}"
            mine = [role for role, ids in sides.items() if self._belongs(key, ids, calls)]
            if calls and len(mine) > 1:  # both answers in one call: ids under their own padding do not matter
                mine = [r for r in mine if self.batch[key].shape == self.batch[sides[r]].shape]
                mine = [r for r in mine if not self._matters_under(key, sides[r])]
                both += [key] * (len(mine) > 1)
            if len(mine) == 1:
                self._add(key, f"{mine[0]}_{kind}", "sure", f"{why}, for the {mine[0]} answers")
            elif not sides and calls and self._is_documents(key):
                self._add(key, "documents", "likely", "it rises along a row, and the ids under a 0 matter")
            elif not sides and (calls or self._takes_out(key, 0)):
                self._add(key, kind, "sure", why)
        left = [role for role in sides if f"{role}_attention" not in self.roles]
        for role, key in zip(left, both, strict=True) if len(left) == len(both) else ():
            self._add(key, f"{role}_attention", "likely", "zeros and ones that the layers read, with both answers")

    def _is_documents(self, key: str) -> bool:
        """Whether zeros and ones are two documents in a row or left padding: ids under padding do not matter."""
        ids, x = self.roles.get("ids"), self.batch[key]
        return ids is not None and bool((x[:, 1:] >= x[:, :-1]).all()) and self._matters_under(key, ids)

    def _matters_under(self, key: str, ids: str) -> bool:
        """Whether the ids matter where this mask of their shape is 0."""
        x = self.batch[key]
        if x.shape != self.batch[ids].shape:
            return False
        (edited, *_) = _edits(self.batch[ids])
        return self._moves({ids: torch.where(x == 0, edited, self.batch[ids])}) > TINY

    def _belongs(self, key: str, ids: str, calls: frozenset[int]) -> bool:
        """Whether a mask belongs to these ids. An attention mask is read in calls that read the ids. If a loss mask
        keeps only the first token of each row, the ids after it do not matter."""
        if calls:
            return bool(calls & self.calls[ids])
        mask, (edited, *_) = self.batch[key], _edits(self.batch[ids])
        place = torch.arange(mask.shape[1], device=mask.device)
        first = mask.int().argmax(1, keepdim=True)
        columns = torch.arange(edited.shape[1], device=mask.device)
        off = {key: torch.where(place == first, mask, torch.zeros_like(mask))}
        after = torch.where(columns > first + 1, edited, self.batch[ids])
        try:
            return self._with(off).gradient.distance(self._with(off | {ids: after}).gradient) <= TINY
        except Exception:
            return False

    def _numbers(self, keys: Sequence[str]) -> None:
        left = [key for key in keys if not self.calls[key]]  # what the layers read is a feature, not a signal
        for key in [k for k in left if self.batch[k].ndim <= 2]:
            if self._signal(key):
                left.remove(key)
        signals = [self.roles[role] for role in ("advantages", "rewards") if role in self.roles]
        zero = {key: torch.zeros_like(self.batch[key]) for key in signals[:1]}
        for key in left:
            if self.batch[key].ndim <= 2:
                self._logprobs(key, zero)
            elif zero:
                self._add(key, "reference_distribution", "likely", "numbers for each token, beside a signal")
            else:
                self._add(key, "teacher", "sure", "numbers for each token, and there are no advantages or rewards")

    def _signal(self, key: str) -> bool:
        """Guess advantages, rewards, weights or returns; returns whether the tensor is one of them."""
        x = self.batch[key]
        spread = float(x.std()) if x.numel() > 1 else 1.0
        if self._moves({key: x + 1 + spread}) <= self.close:
            sure: Sureness = "sure" if x.ndim == 1 else "likely"
            self._add(key, "rewards", sure, "a constant added to all of it changes nothing")
            return True
        none, twice = self._with({key: 0 * x}), self._with({key: 2 * x})
        own, double = self.base.gradient.minus(none.gradient), twice.gradient.minus(none.gradient)
        if twice.gradient.distance(self.base.gradient) <= self.close and bool((x >= 0).all()):
            self._add(key, "weights", "likely", "not negative, and twice all of it changes nothing")
            return True
        if not own.norm() or double.distance(own.times(2)) > self.close:
            return False
        rise, fall = twice.loss - none.loss, 2 * (self.base.loss - none.loss)
        linear = abs(rise - fall) <= 10 * self.close * max(abs(rise), abs(fall), 1e-9)
        if not linear and bool((x <= 0).all()):
            return False  # log-probs in a quadratic penalty
        if not linear:
            self._add(key, "returns", "likely", "the gradient is linear in it and the loss is quadratic")
        elif bool((x < 0).any()) and bool((x > 0).any()):
            self._add(key, "advantages", "sure", "gradient and loss are linear in it, and it has both signs")
        elif bool((x >= 0).all()):
            if bool((x > 0).all()) and 0.5 < float(x.median()) < 2:
                return True  # near 1: perhaps an importance ratio, perhaps a weight
            self._add(key, "weights", "likely", "gradient and loss are linear in it, and it is not negative")
        else:
            return False
        return True

    def _logprobs(self, key: str, zero: Mapping[str, Tensor]) -> None:
        """``zero`` is the change that takes the signal away; empty where there is none."""
        x = self.batch[key]
        negative = bool((x <= 0).all())
        if "returns" in self.roles and not negative:
            self._add(key, "values", "likely", "beside returns, and not linear")
        elif zero and negative:
            (edited, *_) = _edits(x)
            still = self._with(zero).gradient.minus(self._with({**zero, key: edited}).gradient).norm()
            if still > TINY * self.base.gradient.norm():
                self._add(key, "reference", "sure", "log-probs that matter also where the signal is 0")
            else:
                self._add(key, "behaviour", "sure", "log-probs that matter only where there is a signal")

    def _pair_number(self, key: str) -> None:
        x = self.batch[key]
        if x.ndim == 2 and x.shape[1] == 2:
            self._add(key, "reference", "likely", "two numbers for each pair")
            return
        raised = self._with({key: x + 1}).loss - self.base.loss
        if bool((x >= 0).all()) and raised > 0:
            self._add(key, "margin", "likely", "not negative, and raising it raises the loss")
        elif raised:
            side, way = ("chosen", "raises") if raised > 0 else ("rejected", "lowers")
            self._add(key, f"reference_{side}", "sure", f"raising it {way} the loss")


@contextmanager
def _listening(model: nn.Module) -> Iterator[list[float]]:
    """Inside the block, every call of a layer with its own parameters appends a number that depends on all outputs."""
    seen: list[float] = []

    def listen(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            flat = output.detach().double().flatten()
            seen.append(float(flat @ torch.cos(torch.arange(flat.numel(), dtype=torch.float64, device=flat.device))))

    with observed([m for m in model.modules() if any(p is not None for p in m._parameters.values())], listen):
        yield seen


def _named_otherwise(key: str, role: str) -> bool:
    return role not in key.lower() and any(side in key.lower() for side in ("chosen", "rejected"))


def ignored_label(labels: Tensor) -> int | None:
    """The usual negative label that these have, where they have one."""
    return next((value for value in IGNORED if bool((labels == value).any())), None)


def _is_binary(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _edits(tensor: Tensor) -> list[Tensor]:
    """Changed tensors of the same kind, the smallest change first, because a step may raise at one of them."""
    if _is_binary(tensor):
        flat = tensor.flatten()
        on, off = (flat != 0).nonzero()[:, 0], (flat == 0).nonzero()[:, 0]
        changed = flat.index_fill(0, on[len(on) // 3 :: 3], 0), flat.index_fill(0, off[::2], 1)
        return [edited.view(tensor.shape) for edited in changed]
    if tensor.is_floating_point():
        rng = torch.Generator().manual_seed(7)
        spread = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
        noise = torch.randn(tensor.shape, generator=rng).to(tensor.device, tensor.dtype)
        down = tensor - (0.1 + spread) * noise.abs()
        return [down, tensor + 0.3 * (0.1 + spread) * noise]
    if tensor.ndim == 1:  # group numbers: renaming the groups would change nothing, so rows change their group
        return [tensor.roll(1)]
    values = tensor[tensor >= 0].unique()
    other = torch.where(tensor >= 0, next_of(values, tensor) if len(values) > 1 else tensor + 1, tensor)
    if (ignored := ignored_label(tensor)) is None:
        return [other]
    fewer = tensor.flatten().index_fill(0, (tensor.flatten() >= 0).nonzero()[::3, 0], ignored).view(tensor.shape)
    return [other, fewer]  # labels may be read for their places alone

"""``Step``: a training step as a black box with declared inputs and settings; what is declared is checked.

step = Step(model=model, loss=loss_fn,                 # loss_fn(model, batch, **settings) -> loss or (loss, metrics)
            batch=batch,                               # a dict of tensors
            roles={"mask": "completion_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
            settings={"beta": Setting(0.04, "weight"), "clip": Setting(0.2, "clip"),
                      "loss_type": Setting("grpo", modes=("dapo",))},
            metrics={"kl": Metric(low=0.0, weight="beta")},
            optimizer=optimizer, max_grad_norm=1.0, reference=lambda: ref_logprobs(model, batch))
print(audit(step))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from earnest_audit.errors import EarnestError, nearest
from earnest_audit.facts import CLIPS, KINDS, READ_BY, VALUES, Kind, Metric, Setting, sides
from earnest_audit.together import Together

Role = Literal[
    "ids",  # token ids [B, T]
    "labels",  # target ids [B, T]; ignore_index (or mask 0) is not supervised
    "attention",  # 1 real token, 0 padding [B, T]
    "positions",  # position ids [B, T]
    "documents",  # which document of a packed row a token belongs to [B, T]
    "mask",  # 1 where the loss is taken [B, T]
    "advantages",  # [B] or [B, T]
    "behaviour",  # log-probs under the policy that sampled [B, T]
    "proximal",  # the trainer's own at sampling time, where the ratio is to them and behaviour only corrects [B, T]
    "reference",  # log-probs (or logits) under the reference policy; of pairs, both answers' [P, 2]
    "reference_distribution",  # the reference's logits or hidden states
    "teacher",  # log-probs, probabilities or logits of a teacher
    "importance",  # a ratio that corrects for the sampler
    "weights",  # per-token or per-row weights
    "rewards",  # rewards, where the loss makes its own advantages
    "values",  # old values of a critic
    "returns",  # targets of a critic
    "chosen",  # token ids of the preferred answers
    "rejected",  # token ids of the others
    "chosen_mask",  # 1 where the preferred answer's tokens are [P, T]
    "rejected_mask",  # … and the other's
    "chosen_attention",  # 1 real token, 0 padding, of the preferred answers [P, T]
    "rejected_attention",  # … and of the others
    "reference_chosen",  # reference log-probs of the preferred answers
    "reference_rejected",  # … and of the others
    "margin",  # by how much the preferred answers have to win [P]
    "group",  # which prompt a row belongs to [B]
    "correct",  # whether a row's answer is right, where the loss sorts rows by that [B], true or false
]
ROLES: tuple[str, ...] = get_args(Role)
APART = ("advantages", "behaviour", "importance", "values", "returns", "chosen", "rejected", "mask")
"""Roles of which one tensor has at most one."""
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "logprobs": ("model", "batch"), "student": ("model", "batch"), "reference": (), "update": (),
    "backward": ("settings",),
}  # fmt: skip
"""The declared functions beside the loss, with what they are called with."""
Family = Literal["policy gradient", "sft", "divergence", "preference"]
BY_ROLES: tuple[tuple[Family, set[str]], ...] = (
    ("policy gradient", {"advantages"}), ("preference", {"chosen", "rejected"}), ("divergence", {"teacher"}),
    ("policy gradient", {"rewards"}), ("sft", {"labels"}),
)  # fmt: skip
"""The family of a step without a declared one: the first of these whose roles it has."""
Reduction = Literal["mean", "sum"]
Loss = Callable[..., Any]


class StepError(EarnestError):
    """A declaration of a step does not fit the step."""


@dataclass(frozen=True)
class Backward:
    """In ``paths``: a backward pass like ``Step.backward`` instead of a loss, on the step's own batch."""

    fn: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Active:
    """A state in which terms that are inactive by design have a gradient (a KL away from its reference).

    ``settings``  settings that differ from the step's own
    ``perturb``   how far every parameter is perturbed, in units of its own (or a typical) rms; 0: not at all
    ``terms``     term -> what activates it, in words, for every term that is inactive where training begins
    """

    settings: Mapping[str, Any]
    perturb: float
    terms: Mapping[str, str]


@dataclass
class Step:
    """A training step and its declarations. Everything beyond model, loss and batch is optional.

    ``logprobs``   fn(model, batch) -> log-probs like ``behaviour``: switches on the on-policy laws; for preferences
                   a pair of tensors [P]: the sequence log-probs (or averages) that are compared
    ``student``    fn(model, batch) -> what is compared with ``teacher``, in the same form
    ``reference``  fn() -> the reference policy's log-probs: they must not change when the policy does. It is called
                   before that; one that is copied from the policy at its first call is for ``FirstCall``
    ``settings``   name -> ``Setting(value, kind, …)``, or a plain value: ``audit`` guesses its kind from its name
    ``metrics``    name -> ``Metric(low, high, moves, neutral, weight, raises, kind, …)``, or (low, high) alone
    ``paths``      other functions with the loss's signature, or ``Backward(fn)``, that claim the same gradient
    ``optimizer``  the run's own; several, in the order in which they step: a list, or Together(muon, adamw)
    ``may_idle``   patterns of parameters that may legitimately get no gradient from a batch: ("*.experts.*",)
    ``clipped``    the parameters that are passed to clip_grad_norm_
    ``backward``   fn({setting: value}): the run's own backward pass on this batch, which leaves gradients in ``.grad``
                   (micro-batches, a fused kernel); law GL judges them, law DF compares them with the loss's own
    ``update``     fn(): the run's own update from ``.grad`` (clip, guard, optimizer); hooks of the optimizer run in it,
                   and what it changes beside the trainable parameters and the optimizer is the caller's to restore
    ``weighed``    term -> the setting that weighs it, for every term of the loss: each has a gradient by itself
    ``active``     where terms are inactive by design when training begins: the state in which they are judged
    ``wide``       the keys of the tensors that are padded with the rows, of any width; by default all that have their
                   width or that of a narrower signal, which the verdict lists as a guess; () where none ever is
    ``masks``      the keys of further masks: 1 where another term of the loss is taken (a likelihood of tools' tokens)
    ``reduction``  "mean" or "sum": how the loss adds up its rows, where that is known; then law SE checks it
    ``ignore_index`` the label of places that are not supervised: -100, in some libraries -1
    ``value_is_loss`` False where the gradient is not that of the value, by design (stop-gradients: REINFORCE, CISPO)
    ``all_supervised`` True where prompts are meant to be supervised too (pre-training); None where that is not known
    ``precision``  what the step computes in, where that is coarser than its parameters (autocast)
    ``rows_interact`` True where rows are coupled by definition (in-batch negatives, a batch-wide whitening), or the
                   code takes exactly one row; None: unknown
    ``drops_tokens`` True where the loss itself leaves out supervised tokens (the likely ones, rows that are frozen)
    ``empty_rows`` False where every row has a supervised token, so that one without may give NaN
    ``pairwise``   False where each answer is weighed by itself, not against its rival (SPPO, NCA, BCO); None: unknown
    """

    model: nn.Module
    loss: Loss
    batch: Mapping[str, Any]
    roles: Mapping[str, str] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    max_grad_norm: float | None = None
    clipped: Sequence[nn.Parameter] | None = None
    backward: Callable[[Mapping[str, Any]], Any] | None = None
    update: Callable[[], Any] | None = None
    weighed: Mapping[str, str] = field(default_factory=dict)
    active: Active | None = None
    may_idle: Sequence[str] = ()
    reference: Callable[[], Tensor] | None = None
    logprobs: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None
    student: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None
    paths: Mapping[str, Loss | Backward] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    family: Family | None = None
    value_is_loss: bool | None = None
    reduction: Reduction | None = None
    wide: Sequence[str] | None = None
    masks: Sequence[str] = ()
    ignore_index: int = -100
    rows_interact: bool | None = False
    drops_tokens: bool = False
    empty_rows: bool = True
    pairwise: bool | None = True
    all_supervised: bool | None = False
    precision: torch.dtype | None = None
    tokenizer: Any = None
    name: str = "the step"
    seed: int = 0

    def __post_init__(self) -> None:
        members: Any = self.optimizer
        if isinstance(members, list | tuple):
            self.optimizer = Together(*members) if members else None
        self.clipped = None if self.clipped is None else list(self.clipped)
        for fault in self._faults():
            raise StepError(fault)

    def _faults(self) -> Iterator[str]:
        """What is wrong with the declarations; what comes first may make the next checks raise."""
        given: Any = self.optimizer
        limit: Any = self.max_grad_norm
        if isinstance(given, type):
            yield f"optimizer={given.__name__} is a class: give {given.__name__}(model.parameters(), …)."
        if given is not None and not hasattr(given, "param_groups"):
            yield f"optimizer is a {type(given).__name__}, which has no param_groups: give the optimizer it belongs to."
        if limit is not None and not isinstance(limit, Real):
            yield f"max_grad_norm={limit!r} is of type {type(limit).__name__}: give a number, or None for no clipping."
        if isinstance(text := self.may_idle, str):
            yield f"may_idle={text!r} is one text: give a sequence of names, ({text!r},)."
        if not isinstance(self.batch, Mapping) or not self.batch:
            what = "is empty" if isinstance(self.batch, Mapping) else f"is a {type(self.batch).__name__}"
            yield f"the batch {what}: give a dict of tensors."
        for name in ("roles", "settings", "metrics", "paths", "weighed"):
            if not isinstance(getattr(self, name), Mapping):
                yield f"{name} is of type {type(getattr(self, name)).__name__}: give a dict, {name}={{name: …}}."
        for sentence, name, known in self._names():
            if name not in known:
                yield f"{sentence.replace('{}', repr(name))}: {nearest(name, known)}"
        for role, key in self.roles.items():
            if not isinstance(self.batch[key], Tensor):
                yield f"role {role!r} ({key!r}) must be a tensor, got {type(self.batch[key]).__name__}."
        for one, other in combinations([role for role in self.roles if role in APART], 2):
            if self.roles[one] == self.roles[other]:
                yield f"roles {one!r} and {other!r} both name {self.roles[one]!r}, which cannot be both: remove one."
        for option, modes in self.options.items():
            if len(set(map(repr, modes))) < 2:
                yield f"option {option!r} needs at least two different modes, got {list(modes)!r}."
        for name, metric in self.facts.items():
            if metric.low is not None and metric.high is not None and metric.low > metric.high:
                yield f"metric {name!r} has low={metric.low:g} above high={metric.high:g}: exchange the two."

    def _names(self) -> Iterator[tuple[str, str, Collection[str]]]:
        """Every name that a declaration uses, after the error for a name that is not known."""
        for role, key in self.roles.items():
            yield "unknown role {} (roles maps a role to a key of the batch)", role, ROLES
            yield f"role {role!r} names {{}}, which the batch does not have", key, self.batch
        for setting, s in self.declared.items():
            yield f"setting {setting!r} is of an unknown kind {{}}", s.kind, KINDS
        for metric, m in self.facts.items():
            if m.kind is not None:
                yield f"metric {metric!r} is of an unknown kind {{}}", m.kind, VALUES
        for metric, knob in self.weights.items():
            yield f"term {metric!r} is weighed by {{}}, which is no setting", knob, self.knobs
        for what, keys in (("wide", self.wide or ()), ("masks", self.masks)):
            yield from ((f"{what} names {{}}, which the batch does not have", key, self.batch) for key in keys)
        for what, name, choices in (("family", self.family, Family), ("reduction", self.reduction, Reduction)):
            if name is not None:
                yield f"unknown {what} {{}}", name, get_args(choices)

    @property
    def declared(self) -> dict[str, Setting]:
        """Every setting as a ``Setting``."""
        return {n: s if isinstance(s, Setting) else Setting(s) for n, s in self.settings.items()}

    @property
    def options(self) -> dict[str, tuple[Any, ...]]:
        """Settings with several modes, the present one first."""
        return {n: (s.value, *s.modes) for n, s in self.declared.items() if s.modes and s.kind != "inert"}

    @property
    def knobs(self) -> dict[str, Any]:
        """The values of all other settings."""
        return {n: s.value for n, s in self.declared.items() if n not in self.options}

    @property
    def numbers(self) -> dict[str, float]:
        """The present values of all settings that are numbers."""
        values = {n: s.value for n, s in self.declared.items()}
        return {n: v for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    @property
    def pure(self) -> dict[str, Any]:
        """Settings at the values that leave the divergence or the preference alone."""
        return {n: s.pure for n, s in self.declared.items() if s.pure is not None}

    @property
    def facts(self) -> dict[str, Metric]:
        """Every declared metric as a ``Metric``."""
        return {n: m if isinstance(m, Metric) else Metric(*m) for n, m in self.metrics.items()}

    @property
    def weights(self) -> dict[str, str]:
        """Metric of a term -> the setting that weighs it."""
        return {n: m.weight for n, m in self.facts.items() if isinstance(m.weight, str)}

    @property
    def fixed(self) -> list[str]:
        """Metrics that are terms of weight 1; with them, the declared terms are the whole loss."""
        return [n for n, m in self.facts.items() if isinstance(m.weight, float)]

    @property
    def switches(self) -> list[str]:
        """Weights of terms without a metric."""
        return [n for n, s in self.declared.items() if s.kind == "weight" and n not in self.weights.values()]

    def check_call(self) -> None:
        """Raise unless every declared function takes the arguments that it is called with."""
        both, settings = FUNCTIONS["logprobs"], tuple(self.settings)
        calls: list[tuple[str, Any, tuple[str, ...], tuple[str, ...]]] = [("loss", self.loss, both, settings)]
        calls += [(name, fn, taken, ()) for name, taken in FUNCTIONS.items() if (fn := getattr(self, name)) is not None]
        for name, path in self.paths.items():
            own = (path.fn, ("settings",), ()) if isinstance(path, Backward) else (path, both, settings)
            calls.append((f"paths[{name!r}]", *own))
        for name, fn, given, named in calls:
            call = f"{name}({', '.join([*given, *(f'{n}=…' for n in named)])})"
            if not callable(fn):
                raise StepError(f"{name} is of type {type(fn).__name__}: give a function, which is called as {call}.")
            try:
                signature = inspect.signature(fn)
            except (TypeError, ValueError):
                continue  # not written in Python
            try:
                signature.bind(*given, **dict.fromkeys(named))
            except TypeError as error:
                more = "; settings={name: value} declares its further arguments" if fn is self.loss else ""
                raise StepError(f"{name}{signature} cannot be called as {call}: {error}{more}.") from None
            first = [*signature.parameters][:2]
            if given == both and (first[0] == "batch" or first[1:] == ["model"]):
                raise StepError(f"{name}{signature} is called as {call}: exchange its arguments.")

    @property
    def kinds(self) -> dict[str, Kind]:
        """setting -> its kind."""
        return {n: s.kind for n, s in self.declared.items()}

    @property
    def guesses(self) -> dict[str, Kind]:
        """The kinds that a front-end guessed, and that laws of this family read."""
        return {n: s.kind for n, s in self.declared.items() if s.guessed and READ_BY.get(s.kind) == self.kind}

    def first(self, kind: Kind) -> str | None:
        """The first setting of this kind that is a float."""
        return next((n for n, k in self.kinds.items() if k == kind and isinstance(self.knobs.get(n), float)), None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the verdict adds to its notes."""
        return ()

    @property
    def clips(self) -> list[str]:
        """The settings that bound the ratio; at ratio 1 they have no effect."""
        return [n for n, kind in self.kinds.items() if kind in CLIPS and n in self.numbers]

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def terms_off(self) -> dict[str, Any]:
        """Every declared term's weight at 0, so that what is left stands alone."""
        return dict.fromkeys([*self.weights.values(), *self.switches], 0.0)

    def value(self, role: str) -> Tensor | None:
        key = self.roles.get(role)
        return None if key is None else self.batch[key]

    @property
    def ignored(self) -> int | None:
        """The label that takes a place out of the loss; None where another role does that."""
        return self.ignore_index

    @property
    def kind(self) -> Family | None:
        """The declared family, or the one of its roles."""
        return self.family or next((family for family, roles in BY_ROLES if roles <= self.roles.keys()), None)

    @property
    def grouped(self) -> bool:
        """Whether rows are compared within their group."""
        return not self.roles.keys().isdisjoint({"group", "rewards"})

    @property
    def named_sides(self) -> tuple[dict[str, str], list[str]]:
        """Tensors of the chosen answers -> those of the rejected ones, guessed from names where no role pairs them; and
        those of one side without a counterpart."""
        declared = sides(self.roles)[0].items()
        return sides(self.batch.keys() - {self.roles[role] for pair in declared for role in pair})

    @property
    def sides(self) -> dict[str, str]:
        """Tensors of the chosen answers -> those of the rejected ones: by their roles, or else guessed."""
        return {self.roles[c]: self.roles[r] for c, r in sides(self.roles)[0].items()} | self.named_sides[0]

    @property
    def ratio_role(self) -> str:
        """Whose log-probs the ratio is to."""
        return "proximal" if "proximal" in self.roles else "behaviour"

    @property
    def rows(self) -> int:
        """B: the leading size that most tensors with a role (or else most tensors) share."""
        named = [self.batch[k] for k in self.roles.values()] or self.batch.values()
        sizes = [t.shape[0] for t in named if isinstance(t, Tensor) and t.ndim > 0]
        return max(set(sizes), key=sizes.count, default=1)


def check_fields(declared: Mapping[str, Any]) -> None:
    """Raise where a declaration is not a field of ``Step``."""
    known = [f.name for f in fields(Step)]
    for name in declared:
        if name not in known:
            raise StepError(f"{name!r} is not a declaration of a step: {nearest(name, known)}")

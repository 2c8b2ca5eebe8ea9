"""``watch``: the cheap laws, all through a run. An audit looks hard at one step; what goes wrong later is seen here.

    with watch(model, optimizer) as w:
        for batch in loader:
            loss, metrics = ...
            w.terms({"policy": policy_loss, "kl": beta * kl})     # optional, before backward
            loss.backward()
            w.step(loss, metrics, mask=batch["mask"])             # before optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
    print(w.verdict())

The first four updates are looked at, and then every ``every``-th. A failure is a ``WatchWarning`` when it is found,
once, and a row of the verdict at the end. What is not passed is "not declared", and never a pass.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.gradient import nodes
from earnest_audit.law import not_declared
from earnest_audit.laws.liveness import CANCELS, cancelling, idles, largest_entry, some
from earnest_audit.limits import ENOUGH, MANY
from earnest_audit.measure import numbers
from earnest_audit.places import caller, parts
from earnest_audit.together import Together
from earnest_audit.verdict import Finding, Verdict, judged
from earnest_audit.watching import monitors
from earnest_audit.watching.monitors import Streak, entries, hooked, values
from earnest_audit.watching.signals import Signals

MOVES = ("kl", "entropy")  # metrics that cannot stay constant while a policy learns; more are declared
TERMS_EVERY = 100  # updates between two measurements of the terms, for each term: it costs a backward, ⅔ of a step
OWNED = "the optimizer's parameters"

WATCHED: list[list[Watch]] = []
"""Each receives every watch that begins; `earnest audit SCRIPT.py` collects them here."""


class WatchWarning(UserWarning):
    """The watch found a broken law during a run."""


def warn(text: str) -> None:
    """A ``WatchWarning`` at the user's line, however deep in this package or in a library it is found."""
    file, line = parts(caller())
    if file:
        warnings.warn_explicit(text, WatchWarning, file, line)
    else:
        warnings.warn(text, WatchWarning, stacklevel=3)


def _reentrant(loss: Tensor) -> bool:
    """Whether its graph has a reentrant checkpoint, of which `autograd.grad` omits the gradient."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes(loss.grad_fn))


@dataclass
class _Parameter:
    """What was seen of one parameter."""

    idle: Streak = field(default_factory=Streak)  # looks without a gradient, or with one that is all 0
    stuck: Streak = field(default_factory=Streak)  # updates with a gradient and a learning rate that moved no bit
    rows: Tensor | None = None  # of a sparse gradient
    cancels: bool = True  # in every look it was reached, and its gradient was 0 up to rounding
    before: Tensor | None = None


class Watch:
    """Watch a bare training loop; see the module's example. Several optimizers: a list, in the order of their steps.

    ``every``            every how many updates it looks, after the first four
    ``moves``            further metrics that have to move
    ``may_idle``         patterns of parameters that may go without a gradient (experts)
    ``all_supervised``   prompts are meant to be supervised too (pre-training)
    ``may_eval``         the model is meant to leave its training mode on the way
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None, *,
        every: int = 10, moves: Sequence[str] = (), may_idle: Sequence[str] = (), all_supervised: bool = False,
        may_eval: bool = False,
    ) -> None:  # fmt: skip
        if every < 1:
            raise ValueError(f"every={every}: look at every n-th update, n ≥ 1.")
        self.model, self.every, self.moves, self.may_idle = model, every, moves, may_idle
        self.optimizer = Together(*map(hooked, optimizer)) if isinstance(optimizer, Sequence) else hooked(optimizer)
        self.updates = self.looks = 0
        self.place = ""  # the user's line that began it
        self.outside = False  # begun by a front-end: the user has no `w` to declare anything with
        self._seen = {n: _Parameter() for n, p in model.named_parameters() if p.requires_grad}
        self._metrics: dict[str, tuple[float, Streak]] = {}  # the last value, and how often it was that of before
        self._shares: dict[str, list[float]] = {}
        self._terms_at = 0
        self._events: dict[int, dict[str, float]] = {}  # by update: what was not finite then, or soon afterwards
        self._broke = 0  # the last update in which something was not finite
        self._warned: set[tuple[str, str, bool]] = set()
        self._handles: list[Any] = []
        self._signals, self._mode = Signals(all_supervised=all_supervised), monitors.Mode(may_leave=may_eval)
        self._cleared, self._norm = monitors.Cleared(), monitors.Norm()
        self._rates, self._steps = monitors.Rates(), monitors.StepCounter()
        self.unowned = monitors.UnownedParameters()

    def __enter__(self) -> Watch:
        for seen in WATCHED:
            seen.append(self)
        self.place = self.place or caller()
        self._steps.began, self._steps.ended = True, False
        if self.optimizer is not None:
            self._handles = [
                self.optimizer.register_step_pre_hook(lambda _, *c: monitors.at_gradients(self.before_update, *c)),
                self.optimizer.register_step_post_hook(lambda *_: self.after_update()),
            ]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._cleared.stop()
        self._steps.ended = kind is None
        if kind is None:
            self._warn()

    def terms(self, losses: Mapping[str, Tensor]) -> None:
        """Each term's share of the gradient, now and then: one more backward per term, so ⅔ % of the run at most."""
        if not self.due or self.looks < ENOUGH - 1 or self.updates < self._terms_at:
            return
        if any(_reentrant(loss) for loss in losses.values()):
            text = "terms: reentrant checkpointing hides a term's own gradient, so their shares are not watched; "
            warn(text + "use_reentrant=False shows it.")
            self._terms_at = sys.maxsize
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norms = dict.fromkeys(losses, 0.0)
        for name, loss in losses.items():
            if loss.requires_grad:
                found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                norms[name] = math.sqrt(sum(float(values(g).float().square().sum()) for g in found if g is not None))
        total = sum(norms.values())
        for name, norm in norms.items():
            self._shares.setdefault(name, []).append(norm / total if total else 0.0)
        again = any(len(s) == 1 and not s[0] for s in self._shares.values())  # one 0 is weak evidence: look again soon
        self._terms_at = self.updates + (self.every if again else TERMS_EVERY * len(losses))

    def step(
        self, loss: Tensor | float | None = None, metrics: Mapping[str, Any] | None = None, **signals: Any
    ) -> None:
        """What this update logged and was made from. ``metrics``: what is logged, with a ``grad_norm`` among them; a
        constant ``kl`` or ``entropy`` fails. The signals, each optional:

        ``mask``        1 where the loss is taken [B, T]
        ``attention``   1 on real tokens [B, T]
        ``advantages``  [B] or [B, T]
        ``group``       which prompt a row belongs to [B]
        ``logprobs``    the trainer's [B, T]
        ``behaviour``   the sampler's [B, T]
        ``stale``       updates since sampling, 0 by default
        ``truncated``   answers that hit the length limit [B]
        ``ends``        1 where the token that ends a supervised answer is supervised [N]
        """
        logged = numbers({**(metrics or {}), **({} if loss is None else {"loss": loss})})
        self._norm.logged = next((v for name, v in logged.items() if _is_norm(name)), None)
        self.logged(logged)
        self._signals.look(signals, self.due, self.updates)
        self._mode.see(self.model)
        if self.optimizer is None:
            self.before_update()
            self._end_update()
            return
        self._steps.call(self.model, self.optimizer, self.due)
        if not self._steps.steps and self._steps.calls % MANY == 0:
            self._warn()

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Metrics that come when their update has been made."""
        now = numbers(metrics)
        self._finite({f"metric {name}": value for name, value in now.items() if not _is_norm(name)})
        for name, value in now.items():
            last, same = self._metrics.get(name, (math.nan, Streak()))
            same.see(value == last)
            self._metrics[name] = (value, same)

    @property
    def due(self) -> bool:
        return self.updates < ENOUGH or self.updates % self.every == 0

    def before_update(self) -> None:
        """Gradients are there and the parameters are still the old ones."""
        self._steps.begin()
        if self._norm.logged is not None:  # a scaler skips the steps whose norm overflows: then nothing is lost
            self._finite({"metric grad_norm": self._norm.logged})
        self._cleared.end()
        self._mode.see(self.model)
        if not self.due:
            return
        self.looks += 1
        if self.optimizer is not None:
            self._rates.look(self.optimizer)
            self._norm.look(self.optimizer)
            self.unowned.look(self.model.named_parameters(), lambda p: id(p) in self._rates.now)
        parameters = dict(self.model.named_parameters())
        sizes = {name: self._look(name, p) for name, p in parameters.items()}
        largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
        for name, p in parameters.items():
            small = largest > 0 and sizes[name] <= CANCELS * largest
            if p.requires_grad and (p.grad is None or p.ndim > 1 or not small):
                self._seen[name].cancels = False
        self._rates.count(any(size > 0 and math.isfinite(size) for size in sizes.values()))
        self._steps.look(any(size != 0 for size in sizes.values()))
        self._finite({f"gradient of {name}": size for name, size in sizes.items()})

    def _look(self, name: str, p: nn.Parameter) -> float:
        """The size of its gradient; 0 where there is none."""
        if not p.requires_grad:
            if name in self._seen:  # frozen on purpose, for now: nothing is in a row any more
                self._seen[name].idle.row = self._seen[name].stuck.row = 0
            return 0.0
        seen = self._seen.setdefault(name, _Parameter())
        size = 0.0 if p.grad is None else largest_entry(values(p.grad))
        alive = math.isfinite(size) and size > 0
        seen.idle.see(not alive)
        seen.rows = monitors.rows_of(p.grad)
        seen.before = entries(p, seen.rows).clone() if alive and self._rates.full(p) else None
        return size

    def after_update(self) -> None:
        """The optimizer has stepped."""
        if self.due:
            for name, p in self.model.named_parameters():
                seen = self._seen.get(name)
                if seen is not None and seen.before is not None:
                    seen.stuck.see(torch.equal(entries(p, seen.rows), seen.before))
                    seen.before = None
            self._cleared.begin(self.optimizer)
        self._end_update()

    def _end_update(self) -> None:
        self._mode.update(self.model)
        due, self.updates = self.due, self.updates + 1
        if due:
            self._warn()

    def _finite(self, sizes: Mapping[str, float]) -> None:
        """What is not finite once cannot be made good by later looks. What follows within ``every`` updates of the last
        such value belongs to the same event."""
        broken = {name: size for name, size in sizes.items() if not math.isfinite(size)}
        if not broken:
            return
        if new := broken.keys() - {name for event in self._events.values() for name in event}:
            if not self._events or self.updates - self._broke > self.every:
                self._events[self.updates + 1] = {}
            self._events[max(self._events)] |= {name: size for name, size in broken.items() if name in new}
        self._broke = self.updates
        self._warn()

    def _event(self, update: int) -> Finding:
        first, *others = self._events[update]
        metric = first.removeprefix("metric ")
        why = "An infinite or undefined gradient: a log of 0, an empty mask's mean, an overflow in 16 bits."
        why = why if metric == first else f"{metric} is not a number any more; what was learned since may be lost."
        more = f", then {len(others)} more" if others else ""
        meaning = f"{why} Then came {some(others)}." if others else why
        measured = f"{self._events[update][first]} at update {update}{more}"
        return Finding("GL", first, measured, "finite", "fails", meaning)

    def _warn(self) -> None:
        """Warn of each failure once; of one that begins later ("no longer") once more."""
        for finding in self._rows():
            key = (finding.law, finding.subject, "no longer" in finding.measured)
            if finding.outcome == "fails" and key not in self._warned:
                self._warned.add(key)
                warn(str(finding))

    def verdict(self) -> Verdict:
        """Everything that was watched, up to now."""
        return Verdict(tuple(self._rows())).at(self.place)

    def _rows(self) -> Iterator[Finding]:
        yield from self._steps.findings(self.updates, self.looks)
        trained = self._steps.gradients and self.updates
        missing: list[str] = []
        for row in self._findings():
            if self.outside and row.outcome == "not declared" and row.meaning.startswith("Declare "):
                missing.append(row.subject)
            else:  # of a run without an update nothing holds: it was not trained
                yield row if trained or row.outcome != "holds" else replace(row, outcome="not applicable")
        if missing:
            yield Finding(
                "AUDIT", "signals of the batches", "not checked", "-", "not declared",
                f"Not seen from outside the loop: {', '.join(missing)}. In a loop of your own, "
                "`with watch(model, optimizer) as w:` checks them; it receives them by w.terms(…) and w.step(…).",
            )  # fmt: skip

    def _findings(self) -> Iterator[Finding]:
        yield from map(self._event, self._events)
        if self.looks and not self._events:
            yield Finding("GL", "gradients and metrics", f"finite in {self.looks} looks", "finite", "holds")
        if self.looks >= ENOUGH:
            yield self._alive()
            quiet = (n for n, s in self._seen.items() if s.cancels and max(s.idle.row, s.stuck.row) >= ENOUGH)
            if zero := [n for n in quiet if not idles(n, self.may_idle)]:
                yield cancelling(zero)
        else:
            yield Finding("GL", "trainable parameters", f"{self.looks} looks", f"≥ {ENOUGH}", "not applicable", "")
        if self.optimizer is None:
            yield not_declared("GL", "the parameters' bits", "watch(model, optimizer)")
        elif any(s.stuck.looks >= ENOUGH for s in self._seen.values()):
            yield self._bits()
        else:
            off = self._rates.zero.looks > 0 and not self._rates.zero.good
            why = f"fewer than {ENOUGH} looks at a gradient and a rate of at least half its peak"
            yield Finding(
                "GL", "the parameters' bits", "every learning rate is 0" if off else why, "-", "not applicable"
            )
        if self.optimizer is not None and self.looks >= ENOUGH:
            yield self._owned()
            for monitor in (self._rates, self._cleared, self._norm):
                yield from monitor.findings()
        yield from map(self._term, self._shares)
        if not self._shares:
            yield not_declared("GL", "terms", "w.terms({name: loss, …}) before backward")
        has_to_move = {n for n in self._metrics if n.rsplit("/", 1)[-1] in MOVES} | set(self.moves)
        yield from map(self._moving, sorted(has_to_move))
        yield from self._mode.findings(self._steps.ended)
        yield from self._signals.findings()

    def _moving(self, name: str) -> Finding:
        value, same = self._metrics.get(name, (math.nan, Streak()))
        run, count = same.row + 1, same.looks
        if count < MANY:
            return Finding("MR", f"metric {name}", f"{count} values", f"≥ {MANY}", "not applicable", "")
        return judged(
            "MR", f"metric {name}", f"the last {run} of {count} values are equal", f"fewer than {MANY}", run < MANY,
            f"{name} {'was' if run == count else 'became'} {value:.4g} and stays there while the policy is updated: "
            "a constant, a default that nothing sets, or the policy compared with itself.",
        )  # fmt: skip

    def _term(self, name: str) -> Finding:
        shares = self._shares[name]
        measured = f"{min(shares):.0%} … {max(shares):.0%} of the gradient in {len(shares)} looks"
        if len(shares) < 2 and not max(shares):  # a penalty has no gradient at its reference, where runs begin
            return Finding("GL", f"term {name}", measured, "≥ 2 looks", "not applicable", "")
        return judged(
            "GL", f"term {name}", measured, "above 0", max(shares) > 0,
            f"The term {name} adds nothing to the gradient: it is detached, masked away or weighs 0.",
        )  # fmt: skip

    def _alive(self) -> Finding:
        """Without a gradient from the beginning, or in the last MANY looks; what comes back is alive again."""
        seen = {n: s for n, s in self._seen.items() if not idles(n, self.may_idle) and not s.cancels}
        idle = {n: s.idle.good for n, s in seen.items() if s.idle.lasts}
        never, lost = ([n for n, good in idle.items() if bool(good) == late] for late in (False, True))
        text = f"No gradient reached {some(never)} in {self.looks} looks. " if never else ""
        text += f"{some(lost)} had a gradient once, and none in the last {MANY} looks or more. " if lost else ""
        return judged(
            "GL", f"{len(self._seen)} trainable parameters",
            f"{len(self._seen) - len(idle)} got a gradient" + (f", {len(lost)} no longer do" if lost else ""),
            "all", not idle,
            f"{text}Detached, bypassed, 0 · 0, or an expert that no token is sent to (declare it in may_idle).",
        )  # fmt: skip

    def _bits(self) -> Finding:
        seen = {n: s for n, s in self._seen.items() if not s.cancels}
        still = [n for n, s in seen.items() if s.stuck.lasts]
        late = sum(self._seen[n].stuck.good > 0 for n in still)
        return judged(
            "GL", "the parameters' bits",
            f"{len(still) - late} parameters with a gradient never moved" + (f", {late} no longer do" if late else ""),
            "0", not still,
            f"{some(still)} get a gradient and do not move: the update is rounded away in their dtype (keep trainable "
            "parameters in fp32, or raise the learning rate), or another tensor is updated.",
        )  # fmt: skip

    def _owned(self) -> Finding:
        """If the watched optimizer owns nothing of this model, it was made for another one: nothing is waited for."""
        missing, late = self.unowned.missing(patient=any(id(p) in self._rates.now for p in self.model.parameters()))
        if late and not missing:
            waits = f"{len(late)} with a gradient stayed constant up to now; another optimizer may own them"
            return Finding("GL", OWNED, waits, "0", "not applicable", monitors.unowned_text(late))
        measured = f"{len(missing)} with a gradient are missing, and stay constant"
        return judged("GL", OWNED, measured, "0", not missing, monitors.unowned_text(missing))


def _is_norm(name: str) -> bool:
    return name.rsplit("/", 1)[-1] == "grad_norm"


watch = Watch

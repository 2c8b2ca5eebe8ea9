"""``AuditCallback``: the laws on the first batch of a ``transformers.Trainer`` or a TRL trainer, then a watch.

    callback = AuditCallback()
    trainer = SFTTrainer(..., callbacks=[callback])
    trainer.train()
    print(callback.verdict())

The audit runs inside the first training step, before any update, through the trainer's own ``compute_loss``; the model,
the optimizer, the random generators and the trainer's counters are bit-equal afterwards, so the run is the same run.
An audit or a watch that cannot be made warns and lets the run go on, unless ``stop`` is set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from earnest_audit import executor
from earnest_audit.executor import announce, audit
from earnest_audit.frontends import names
from earnest_audit.frontends.trainers import EXPERTS, asks_for_a_mask, routes, step_of_trainer, unchanged
from earnest_audit.limits import MANY
from earnest_audit.measure import RecordingBatch, fresh, result_of
from earnest_audit.restore import replaced, restored, seeded, without_dropout
from earnest_audit.step import StepError
from earnest_audit.verdict import Finding, LawBroken, Verdict, judged, unchecked
from earnest_audit.watching.monitors import hooked
from earnest_audit.watching.watcher import Watch, WatchWarning, warn


class AuditCallback(TrainerCallback):
    """``quick`` does the cheap laws; ``stop`` raises ``LawBroken`` instead of warning; ``all_supervised``: whether
    prompts are meant to be supervised too (None: where everything is, the row is "not declared"). ``verdict()`` returns
    what was found; a line at the end of training counts it.

    Overhead: some dozens of step times once, then the watch's (every ``every``-th update is looked at).
    """

    def __init__(
        self, *, quick: bool = False, stop: bool = False, every: int = 10, all_supervised: bool | None = None
    ) -> None:
        self.quick, self.stop, self.every, self.all_supervised = quick, stop, every, all_supervised
        self.audited: Verdict | None = None
        self.watch: Watch | None = None
        self._trainer: Any = None
        self._instance: Any = None  # a compute_loss that the user gave to the trainer itself
        self._waited, self._watches = 0, True

    def verdict(self) -> Verdict:
        """What the audit and the watch have found up to now."""
        both = [self.audited, self.watch.verdict() if self.watch is not None else None]
        return sum((v for v in both if v is not None), Verdict(()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = _calling_trainer()
        self._leave(RuntimeError)  # a run that raised
        self._trainer, self._instance, self._own = trainer, vars(trainer).get("compute_loss"), trainer.compute_loss
        self._trainer.compute_loss = self._compute_loss
        self.audited, self.watch, self._waited, self._watches = None, None, 0, True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.watch is not None and self._watches and logs:
            with self._safely("watch"):
                self.watch.logged({k: v for k, v in logs.items() if not k.startswith("eval_")})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave(None)
        if getattr(state, "is_world_process_zero", True):
            print(f"AuditCallback: {self.verdict().summary}. `.verdict()` has the rows.", file=sys.stderr)

    def _leave(self, kind: type[BaseException] | None) -> None:
        """The trainer gets its own compute_loss back, and the watch ends."""
        if self._trainer is not None:
            vars(self._trainer).pop("compute_loss", None)
            if self._instance is not None and not isinstance(getattr(self._instance, "__self__", None), AuditCallback):
                self._trainer.compute_loss = self._instance
        if self.watch is not None:
            self.watch.__exit__(kind, None, None)
        self._trainer = None

    def _compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training and torch.is_grad_enabled():
            if self.audited is None and not self._postponed(inputs):
                with self._safely("audit"):
                    self.audited = self._audit(model, inputs, num_items_in_batch)
            with self._safely("watch"):
                # After the audit: its hooks must not count the audit's own updates.
                if self._watches and self.audited is not None:
                    if self.watch is None:
                        idle = EXPERTS if routes(model) else ()
                        self.watch = Watch(model, self._trainer.optimizer, every=self.every, may_idle=idle)
                        self.watch.outside = True
                        self.watch.__enter__()
                    self.watch.step(**self._signals(inputs))
        return self._own(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    @contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        """What raises inside becomes one row and one warning: it must not end the user's run, unless ``stop``."""
        try:
            yield
        except (LawBroken, WatchWarning):
            raise
        except Exception as error:
            if self.stop:
                raise
            row = unchecked("GL", f"the {what}", error, f"The {what} raised, and the run goes on without it.")
            self.audited = (self.audited or Verdict(())) + Verdict((row,))
            announce(Verdict((row,)))
            if what == "watch":
                self._watches = False
                if self.watch is not None:
                    self.watch.__exit__(type(error), error, None)
            warn(f"the {what} {row.measured}; the run goes on without it.")

    def _postponed(self, inputs: Any) -> bool:
        """A batch whose advantages are all 0 has no gradient, legitimately; the next one may have. After MANY such
        batches the audit is made on one of them."""
        advantages = inputs.get("advantages") if hasattr(inputs, "get") else None
        if not isinstance(advantages, Tensor) or bool((advantages != 0).any()):
            return False
        self._waited += 1
        return self._waited < MANY

    def _audit(self, model: nn.Module, inputs: Any, items: Any) -> Verdict:
        trainer = self._trainer
        intended = False if asks_for_a_mask(trainer, inputs) else self.all_supervised
        with unchanged(trainer), restored(model, hooked(trainer.optimizer)), seeded(int(trainer.args.seed)):
            step = step_of_trainer(trainer, model, fresh(inputs), self._own, items=items, all_supervised=intended)
            with replaced(executor, {"LISTENERS": []}):  # called once, below, with the complete verdict
                verdict = audit(step, quick=self.quick, guess=names)
            rows = (*self._counted(model, inputs, items), *self._dropped(model, fresh(inputs), items))
            verdict += Verdict(rows)
        verdict = replace(verdict, findings=tuple(map(_of_a_trainer, verdict.findings)))
        announce(verdict)
        if self.stop:
            verdict.raise_if_failed()
        for f in (*verdict.failures, *verdict.warnings):
            warn(str(f))
        return verdict

    def _counted(self, model: nn.Module, inputs: Any, items: Any) -> Iterator[Finding]:
        """Under accumulation the trainer leaves the division to a loss that receives the number of items: twice the
        number must change it. A trainer that declares who divides (``loss_is_scaled_for_ga``) is not checked."""
        trainer = self._trainer
        own = callable(getattr(trainer, "compute_loss_func", None))
        reads_count = own or getattr(trainer, "model_accepts_loss_kwargs", False)
        declared = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
        if items is None or declared or not reads_count or trainer.args.gradient_accumulation_steps < 2:
            return
        one, two = (result_of(self._loss(model, fresh(inputs), n))[0].item() for n in (items, 2 * items))
        yield judged(
            "SE", "num_items_in_batch", f"twice the number makes the loss {one:.4g} to {two:.4g}", "it changes",
            one != two,
            "The loss does not read the number of items that it receives, and the trainer does not divide either: with "
            f"{trainer.args.gradient_accumulation_steps} micro-batches the gradient is too large by this factor. "
            "Divide a sum by num_items_in_batch, or set model_accepts_loss_kwargs=False.",
        )  # fmt: skip

    def _dropped(self, model: nn.Module, inputs: Any, items: Any) -> Iterator[Finding]:
        """Columns of the dataset that ``compute_loss`` reads and ``remove_unused_columns`` removed."""
        trainer = self._trainer
        has: Any = getattr(getattr(trainer, "train_dataset", None), "column_names", None)
        kept: Any = getattr(trainer, "_signature_columns", None)
        removes = getattr(trainer.args, "remove_unused_columns", False) and isinstance(has, list) and kept
        gone = set(has) - set(kept) - set(inputs) if removes else set()
        if not gone:
            return
        listening = RecordingBatch(inputs)
        try:
            self._loss(model, listening, items)
        except Exception:
            return  # a loss that needs its inputs as they are; the laws have had it already
        for name in sorted(gone & listening.accessed):
            yield Finding(
                "IG", f"column {name}", "compute_loss reads it, the dataset has it, the batch has not",
                "it is in the batch", "not declared",
                f"The Trainer drops columns that the model's forward does not take, {name} among them, and the loss "
                "goes on without. remove_unused_columns=False keeps it (and the collator has to pass it on).",
            )  # fmt: skip

    def _loss(self, model: nn.Module, inputs: Any, items: Any) -> Any:
        """The trainer's own loss without a graph or dropout; the trainer is as it was afterwards."""
        with torch.no_grad(), unchanged(self._trainer), without_dropout(model), seeded(int(self._trainer.args.seed)):
            return self._own(model, inputs, num_items_in_batch=items)

    def _signals(self, inputs: Any) -> dict[str, Any]:
        keys = {"mask": "completion_mask", "advantages": "advantages", "behaviour": "sampling_per_token_logps"}
        given = {name: inputs.get(key) for name, key in keys.items()}
        if isinstance(labels := inputs.get("labels"), Tensor):
            given["mask"] = labels != -100
        if asks_for_a_mask(self._trainer, inputs):
            given["attention"] = inputs.get("attention_mask")
        if self.watch is not None and self.watch.due:
            given["ends"] = _ends(self._trainer, inputs)
        if given["behaviour"] is not None:  # beside the trainer's, at the time of sampling
            given["logprobs"] = inputs.get("old_per_token_logps")
        return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _of_a_trainer(row: Finding) -> Finding:
    """In a row that asks for a declaration: where it is made, because a trainer takes none."""
    if row.outcome != "not declared" or not row.meaning.startswith("Declare "):
        return row
    return replace(row, meaning=f"Of a Trainer this is not known. In audit(Step(…)): {row.meaning}")


def _calling_trainer() -> Any:
    """The trainer whose event this is: callbacks do not receive it, but it is in the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise StepError("AuditCallback was called by no transformers.Trainer; for a bare loop use earnest_audit.watch.")


def _ends(trainer: Any, inputs: Any) -> Tensor | None:
    """Of rows whose last real token is the end token, after a supervised one: whether it is supervised. Checked only
    where the end token is the padding too: a collator that masks the one masks the other."""
    words = getattr(trainer, "processing_class", None) or getattr(trainer.data_collator, "tokenizer", None)
    end = getattr(words, "eos_token_id", None)
    ids, labels, shown = (inputs.get(key) for key in ("input_ids", "labels", "attention_mask"))
    if end is None or end != getattr(words, "pad_token_id", None):
        return None
    if not all(isinstance(t, Tensor) and t.ndim == 2 and t.shape == ids.shape for t in (ids, labels, shown)):
        return None
    taught = labels != -100
    if ids.shape[1] < 2 or not bool((labels == ids)[taught].all()):
        return None  # labels of another kind
    last = ((shown != 0) * torch.arange(ids.shape[1], device=ids.device)).argmax(-1, keepdim=True).clamp(min=1)
    closes = (ids.gather(1, last) == end) & (shown.gather(1, last) != 0) & taught.gather(1, last - 1)
    found: Tensor = taught.gather(1, last)[closes]
    return found

"""``TinkerEngine``: the ``Engine`` protocol on a Tinker service (the hosted one, or ``earnest serve``).

    scalars    a forward pass with the targets that the needs name               lp [N, C]
    objective  here, on those log-probs: the same code as everywhere
    backward   ``cross_entropy`` with weights -∂L/∂lp: the chain rule, not an approximation
    update     ``optim_step``

``step`` is ``forward_backward_custom`` around the objective, then the update. A top-K divergence goes as K targets per
position with exact weights; with ``estimator="sampled"`` it is one advantage per sampled token instead. Needs that
log-probs of named tokens do not determine (entropies, whole distributions, other temperatures) are refused.
Shapes: N active tokens, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import LoRA
from earnest.engines import checkpoint
from earnest.engines.base import Guard
from earnest.engines.estimator import demand_ratio
from earnest.engines.optimizers import AdamW, Optimizer
from earnest.engines.reports import Pass, StepReport, UpdateReport, report_of
from earnest.engines.tinker import client as remote
from earnest.engines.tinker.columns import Columns, Estimator, plan
from earnest.engines.tinker.policy import RemoteAdapter, RemotePolicy
from earnest.engines.tinker.samples import RemoteSample, ScalarSample, TopKSample, batch_of
from earnest.engines.tinker.scoring import score
from earnest.engines.tinker.teachers import AnyTeacher, RemoteEMA, RemoteTeacher
from earnest.errors import CheckpointError, ConfigError, ObjectiveError, SignalError
from earnest.models.sampling import SampleSpec
from earnest.objectives.base import Evaluation, Objective, Term
from earnest.objectives.needs import Need
from earnest.objectives.view import Scalars
from earnest.rollouts.rollout import Rollout
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution, TopK
from earnest.signals.scorer import Wanted, Who

ALPHA = 32.0
"""The alpha of every LoRA on a Tinker service."""


class TinkerEngine:
    """A LoRA on a Tinker service, trained with earnest's objectives.

    ``version`` counts updates; every rollout and checkpoint carries it. ``max_grad_norm`` None: no clipping. ``outer``
    runs after every update: a ``RemoteEMA`` teacher, for instance. ``tokenizer``: where the service's own cannot be
    loaded from here.
    """

    def __init__(
        self,
        base_model: str,
        optimizer: Optimizer | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        rank: int = 32,
        seed: int = 0,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        max_grad_norm: float | None = 1.0,
        estimator: Estimator = "exact",
        outer: RemoteEMA | None = None,
        tokenizer: Any = None,
    ) -> None:
        if estimator not in ("exact", "sampled"):
            raise ConfigError(f"estimator is {estimator!r}; give 'exact' or 'sampled'.")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; give a number above 0, or None for no clipping.")
        self.optimizer_spec = optimizer or AdamW()
        if type(self.optimizer_spec) is not AdamW:
            raise ConfigError(f"a Tinker service steps with AdamW, not {self.optimizer_spec!r}; give en.AdamW(…).")
        if self.optimizer_spec.lr_ratio != 1:
            raise ConfigError("optimizer.lr_ratio: a Tinker service has one rate for all tensors; leave it out.")
        self.max_grad_norm, self.estimator, self.outer = max_grad_norm, estimator, outer
        self.service = remote.connect(base_url, api_key)
        self.base_model = base_model
        self.training = self.service.create_lora_training_client(
            base_model, rank=rank, seed=seed, train_attn=train_attn, train_mlp=train_mlp, train_unembed=train_unembed
        )
        self.policy = RemotePolicy(base_model, tokenizer or self.training.get_tokenizer(), None)
        self.adapter = RemoteAdapter(LoRA(rank=rank, alpha=ALPHA), self._keep)
        self.version = 0
        self.tokens = 0
        self.objective_state: dict[str, dict[str, Any]] = {}
        self._samplers: dict[str, Any] = {}
        self._pending = False
        self._next: float | None = None  # the next update's rate as a share of lr; None: by the version
        self._rate = self.optimizer_spec.lr
        if outer is not None:
            outer.start(self)

    guard: Guard | None = None
    local: None = None

    @property
    def learning_rate(self) -> float:
        """The rate of the newest update; lr before the first."""
        return self._rate

    def plan(self, t: int, total: int) -> None:
        """The next update is number ``t`` (from 1) of ``total``: it has the schedule's rate of that number."""
        schedule = self.optimizer_spec.schedule
        self._next = None if schedule is None else schedule.share(t, total)

    def sampler(self, whose: str) -> Any:
        """A ``tinker.SamplingClient`` of the live weights, the base, or saved ones (a tinker:// path)."""
        if whose == "live":
            key = f"live {self.version}"
            if key not in self._samplers:
                self._samplers = {k: v for k, v in self._samplers.items() if not k.startswith("live ")}
                self._samplers[key] = self.training.save_weights_and_get_sampling_client()
            return self._samplers[key]
        if whose not in self._samplers:
            given = {"base_model": self.base_model} if whose == "base" else {"model_path": whose}
            self._samplers[whose] = self.service.create_sampling_client(**given)
        return self._samplers[whose]

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt by the live policy, prompt by prompt, with their exact log-probs."""
        drawn = remote.sample(self.sampler("live"), prompts, n, spec)
        return [
            Rollout(
                i, j, tuple(prompts[i]), tuple(s.tokens), tuple(s.logprobs), s.stop_reason, self.version,
                spec.temperature or 1.0,
            )
            for i, sequences in enumerate(drawn)
            for j, s in enumerate(sequences)
        ]  # fmt: skip

    def score(self, batch: Batch, want: Wanted, policy: Who = "live") -> Tensor | Distribution:
        """Log-probs or a top K at the active tokens, of the live policy or the base; no hidden states, no logits."""
        if policy == "previous":
            raise SignalError("a Tinker model has one adapter and no earlier rounds; its reference is 'base'.")
        return score(self.sampler(policy), batch, want)

    def top_k(self, batch: Batch, k: int) -> TopK:
        """The live policy's k most probable tokens at every active token."""
        return RemoteTeacher("live").top(self, batch, k)

    def observe(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Sequence[int]] | None = None,
        teacher: AnyTeacher | None = None,
        *,
        top_k: int = 0,
        support: Literal["student", "teacher"] = "teacher",
    ) -> list[RemoteSample]:
        """The rollouts with a teacher's log-probs of them, after feedback-conditioned ``prompts`` or the same ones.
        ``top_k`` 0: scalar samples. Otherwise both sides at K ids, those of the teacher or of the student (as it was
        when this was called); the sampled tokens' exact log-probs are there either way."""
        if not rollouts:
            raise SignalError("there are no rollouts to observe.")
        if prompts is not None and len(prompts) != len(rollouts):
            raise SignalError(
                f"need a feedback-conditioned prompt for each of {len(rollouts)} rollouts, got {len(prompts)}."
            )
        if top_k < 0 or support not in ("student", "teacher"):
            raise SignalError(f"top_k is {top_k} and support {support!r}; give K ≥ 0 and 'student' or 'teacher'.")
        if any(r.temperature != 1 for r in rollouts):
            raise SignalError("the rollouts were sampled at another temperature than 1; a remote teacher scores at 1.")
        teacher = teacher or RemoteTeacher("live")
        completions, sizes = [r.tokens for r in rollouts], [len(r.tokens) for r in rollouts]
        own = Batch.from_rows([r.prompt for r in rollouts], completions)
        theirs = own if prompts is None else Batch.from_rows(prompts, completions)
        exact = teacher.logprobs(self, theirs).split(sizes)
        common = [_common(r, lp, teacher) for r, lp in zip(rollouts, exact, strict=True)]
        if top_k == 0:
            return [ScalarSample(**fields) for fields in common]
        if support == "student":
            top = self.top_k(own, top_k)
            ours, yours = top.logprobs, teacher.at(self, theirs, top.ids)
        else:
            top = teacher.top(self, theirs, top_k)
            ours, yours = RemoteTeacher("live").at(self, own, top.ids), top.logprobs
        parts = zip(common, *(t.split(sizes) for t in (top.ids, ours.clamp(max=0), yours.clamp(max=0))), strict=True)
        return [TopKSample(**fields, support=support, ids=i, student_top=s, teacher_top=t) for fields, i, s, t in parts]

    batch_of = staticmethod(batch_of)

    def scalars(self, batch: Batch, needs: Sequence[Need]) -> Scalars:
        """The whole batch's scalars, without a graph."""
        columns = self._plan(batch, needs)
        with torch.no_grad():
            return columns.fields(remote.forward(self.training, batch, columns.targets))

    def backward(self, batch: Batch, weights: Mapping[Need, Tensor]) -> None:
        """Add Σ weights · ∂scalars/∂θ to the gradients there; ``weights`` are laid out as ``scalars`` gives them."""
        columns = self._plan(batch, list(weights))
        lp = remote.forward(self.training, batch, columns.targets).requires_grad_()
        fields = columns.fields(lp)
        pairs = [(f.values, weights[n].to(f.values)) for n, f in fields.items() if f.values.requires_grad]
        total = torch.stack([(v * w).sum() for v, w in pairs]).sum()
        (slope,) = torch.autograd.grad(total, lp)
        remote.backward(self.training, batch, columns.targets, slope)
        self._pending = True

    def update(self) -> UpdateReport:
        """Clip and AdamW there, then ``outer``; the version counts up.

        Norms are what the service reports; nan where it reports none.
        """
        if not self._pending:
            raise ObjectiveError(
                "update() before any backward(): there is no gradient. Call step(), or backward() first."
            )
        spec = self.optimizer_spec
        assert isinstance(spec, AdamW)
        self._rate = spec.lr
        if spec.schedule is not None:
            self._rate *= spec.schedule.share(self.version + 1) if self._next is None else self._next
        done = remote.optim_step(self.training, spec, self._rate, self.max_grad_norm)
        self._pending, self._next = False, None
        self.version += 1
        outer = self.outer.after_update(self) if self.outer is not None else {}
        return UpdateReport(done.norm, done.factor, done.moved, self.version, {}, outer, self._rate)

    def step(self, batch: Batch, objective: Objective | Term, *, shares: bool = False) -> StepReport:
        """Forward, objective, backward and update. ``shares`` is refused: a service shows no gradients."""
        if shares:
            raise ObjectiveError("shares: a remote engine does not show gradients; ask for them on a LocalEngine.")
        objective = Objective.of(objective)
        idle, needs, counts = objective.prepare(batch, self.objective_state)
        columns = self._plan(batch, needs)
        if self.estimator == "sampled":
            demand_ratio(batch, objective, self.objective_state, self.version, idle)
        seen: list[Evaluation] = []

        def loss(lp: Float[Tensor, "N C"]) -> Tensor:
            fields = columns.fields(lp)
            result = objective.evaluate(batch, fields, self.objective_state, counts)
            seen.append(result)
            return result.loss + (lp * 0).sum()  # a gradient of 0 for every column: the SDK wants one for each

        remote.custom(self.training, batch, columns.targets, loss)
        self._pending = True
        (result,) = seen
        passes = f"forward_backward_custom, {columns.targets.shape[1]} targets per position"
        worth, tokens = float(result.loss.detach()), batch.active.shape[0]
        done = Pass(
            worth, result.values, idle, passes=passes, micro_batches=1, tokens=tokens,
            computed_tokens=sum(batch.lengths), padded_tokens=0, layout="by the service",
        )  # fmt: skip
        self.tokens += tokens
        report = report_of(objective, done, self.update())
        self.objective_state = objective.advance(self.objective_state, done.values)
        return report

    def gradients(self, batch: Batch, objective: Objective | Term) -> dict[str, Tensor]:
        """Refused: a service does not send its gradients."""
        raise ObjectiveError("a Tinker service does not show gradients; ask for them on a LocalEngine.")

    def _plan(self, batch: Batch, needs: Sequence[Need]) -> Columns:
        return plan(batch, needs, self.policy.vocabulary, self.estimator, partial(self.top_k, batch))

    def _keep(self) -> str:
        return str(self.training.save_weights_for_sampler(f"earnest-v{self.version}").result().path)

    def save(self, folder: Path | str) -> Path:
        """The weights and the optimizer stay with the service; the folder has their path and the rest."""
        path = self.training.save_state(f"earnest-v{self.version}-{Path(folder).name}", overwrite=True).result().path
        meta = {
            "path": path,
            "version": self.version,
            "objective_state": self.objective_state,
            "optimizer_spec": repr(self.optimizer_spec),
            "base_model": self.base_model,
        }
        return checkpoint.write(folder, {"version": torch.tensor(self.version)}, meta)

    def load(self, folder: Path | str) -> None:
        """Continue from ``folder``, in a new training run there."""
        if self.outer is not None:
            raise CheckpointError(
                "an average of past weights cannot be continued: its samplers ended with the process that made them. "
                "Start it again, or use a live, base or frozen teacher."
            )
        _, meta = checkpoint.read(folder)
        if meta["base_model"] != self.base_model:
            raise CheckpointError(f"{folder} was made on {meta['base_model']}, this engine has {self.base_model}.")
        if meta["optimizer_spec"] != repr(self.optimizer_spec):
            raise CheckpointError(
                f"{folder} was made with {meta['optimizer_spec']}, this engine has {self.optimizer_spec!r}."
            )
        self.training = self.service.create_training_client_from_state_with_optimizer(meta["path"])
        self.version, self.objective_state = int(meta["version"]), meta["objective_state"]
        self._samplers, self._pending = {}, False

    def close(self) -> None:
        """End the session; what was saved stays."""
        self.service.close("success").result()


def _common(rollout: Rollout, exact: Float[Tensor, " n"], teacher: AnyTeacher) -> dict[str, Any]:
    """The fields of both kinds of sample."""
    return {
        "prompt": rollout.prompt,
        "tokens": rollout.tokens,
        "logprobs": rollout.logprobs,
        "teacher": tuple(exact.clamp(max=0).tolist()),
        "teacher_kind": teacher.kind,
        "group": rollout.prompt_index,
        "policy_version": rollout.policy_version,
    }

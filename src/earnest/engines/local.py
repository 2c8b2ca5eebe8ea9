"""``LocalEngine``: a step on this machine, in PyTorch.

    one pass     the batch is one micro-batch, or the objective is additive: forward, objective, backward, each once
    two passes   the objective is not a sum over rows (such as an rmse over positions) and the batch is cut: first the
                 whole batch's scalars, without a graph; then the objective on them; then forward and backward by part

In both cases the gradient is that of the whole batch and does not depend on the cut, nor on how the rows of a
micro-batch are laid out: packed (``engines.packing``) or padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import Adapter, without_adapters
from earnest.engines import micro, passes, scoring, state
from earnest.engines.activations import checkpoint_activations as checkpoint_activations_of
from earnest.engines.base import Guard, GuardOfParts, Outer
from earnest.engines.compiling import CompiledLayers
from earnest.engines.estimator import demand_ratio
from earnest.engines.estimator import fields as sampled_fields
from earnest.engines.mesh import Mesh
from earnest.engines.muon import MuonAndAdamW
from earnest.engines.optimizers import AdamW, Optimizer, set_rates, split_rates
from earnest.engines.packing import Attention
from earnest.engines.reports import Pass, StepReport, UpdateReport, report_of
from earnest.engines.sharding import free, shard, sum_over_ranks, whole
from earnest.engines.spectral import spectral_norms
from earnest.engines.tensor import split
from earnest.engines.trained import Trained, refuse_whole_readers
from earnest.engines.vocabulary import scalars as vocabulary_scalars
from earnest.errors import ConfigError, NothingToTrain, ObjectiveError
from earnest.models.policy import Policy
from earnest.models.sampling import SampleSpec, evaluating
from earnest.objectives.base import Objective, Term, Value
from earnest.objectives.needs import LogProb, Need, SpectralNorm
from earnest.objectives.view import Field, Scalars
from earnest.rollouts.rollout import Rollout
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution, Hidden
from earnest.signals.scorer import AtIdsWanted, HiddenWanted, LogProbsWanted, TopKWanted, Wanted, Who

if TYPE_CHECKING:
    from earnest.models.slots import SlotSampler


class LocalEngine:
    """A policy, an adapter on it and an optimizer of exactly the adapter's parameters.

    Without ``optimizer`` it is AdamW at the learning rate that the adapter's variant declares (``variant.lr``).
    ``version`` counts updates; every rollout and every checkpoint has one. ``tokens`` counts the tokens trained on
    since the engine was made; replicas are weighted by it. ``micro_tokens`` limits the tokens of a micro-batch.
    ``pack``: True packs rows, False pads them; None packs them where it is exact and clearly cheaper, and not in 16
    bits on a CPU, where other shapes of the same products round visibly. ``packed_attention``: "sdpa" or "flex"; None
    takes flex-attention on GPUs if it passes a test on the model (``engines.packing``). ``guard`` checks each update
    after the optimizer, ``outer`` runs after the guard. ``estimator``: divergences over the vocabulary, or as an engine
    without logits estimates them (``engines.estimator``). ``mesh``: the processes that train together; each calls every
    method with the same arguments, and gets the same results. ``offload`` keeps a sharded base in CPU memory;
    ``checkpoint_activations`` keeps only the inputs of each layer for the backward pass; ``compile`` compiles each
    layer for training (``engines.compiling``).
    """

    def __init__(
        self,
        policy: Policy,
        adapter: Adapter,
        optimizer: Optimizer | None = None,
        *,
        guard: Guard | None = None,
        outer: Outer | None = None,
        max_grad_norm: float | None = 1.0,
        micro_tokens: int = 8192,
        estimator: Literal["exact", "sampled"] = "exact",
        pack: bool | None = None,
        packed_attention: Attention | None = None,
        mesh: Mesh | None = None,
        offload: bool = False,
        checkpoint_activations: bool = False,
        compile: bool = False,
    ) -> None:
        if estimator not in ("exact", "sampled"):
            raise ConfigError(f"estimator is {estimator!r}; give 'exact' or 'sampled'.")
        self.estimator = estimator
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; give a number above 0, or None for no clipping.")
        if micro_tokens < 1:
            raise ConfigError(f"micro_tokens is {micro_tokens}; give at least 1 (one row is always taken).")
        self.policy, self.adapter, self.guard, self.outer = policy, adapter, guard, outer
        self.max_grad_norm, self.micro_tokens = max_grad_norm, micro_tokens
        self.compiled = CompiledLayers(policy.body) if compile else None
        self.mesh = mesh or Mesh()
        self.team = split(policy, adapter, self.mesh) if self.mesh.tensor > 1 else None
        if checkpoint_activations:
            checkpoint_activations_of(policy.body, self.team)
        if self.mesh.shard > 1:
            shard(policy, adapter, self.mesh, offload=offload)
        self.trained = Trained(adapter.named_parameters(), self.mesh)
        self.names, self.parameters = self.trained.names, self.trained.parameters
        self.optimizer_spec = optimizer or AdamW(lr=adapter.variant.lr)
        if self.trained.any_sharded:
            refuse_whole_readers(self.optimizer_spec, guard)
        self.optimizer = self.optimizer_spec.build(
            self.trained.own(adapter.decay_parameters()), self.trained.own(adapter.no_decay_parameters())
        )
        if (ratio := self.optimizer_spec.lr_ratio) != 1:
            if not (faster := adapter.faster_parameters()):
                raise ConfigError(
                    f"optimizer.lr_ratio: {ratio:g} has no meaning for {adapter.variant.name}, which declares no "
                    "tensors for it; take lora, or leave it out."
                )
            split_rates(self.optimizer, self.trained.own(faster), ratio)
        if isinstance(self.optimizer, MuonAndAdamW):
            self.optimizer.held = self.trained.of
        if guard is not None:
            if isinstance(guard, GuardOfParts) and self.trained.any_sharded:
                guard.set_parts(dict(zip(self.names, self.parameters, strict=True)))
            guard.bind(adapter, self.optimizer)
        self.layouts = micro.Layouts(policy, self.mesh, pack, self.team, packed_attention)
        self.version = 0
        self.tokens = 0
        self.planned: float | None = None  # the next update's rate as a share of lr; None: by the version
        self.objective_state: dict[str, dict[str, Any]] = {}

    @property
    def local(self) -> LocalEngine:
        return self

    @property
    def learning_rate(self) -> float:
        """The rate of the newest update; lr before the first."""
        return float(self.optimizer.param_groups[0]["lr"])

    def plan(self, t: int, total: int) -> None:
        """The next update is number ``t`` (from 1) of ``total``: it has the schedule's rate of that number."""
        schedule = self.optimizer_spec.schedule
        self.planned = None if schedule is None else schedule.share(t, total)

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt by the live policy, prompt by prompt, with their exact log-probs."""
        from earnest.models.slots import sample

        # each rank samples some of the prompts; all completions of equal prompts are one rank's
        distinct = {p: i for i, p in enumerate(dict.fromkeys(map(tuple, prompts)))}
        mine = [i for i, p in enumerate(prompts) if distinct[tuple(p)] % self.mesh.teams == self.mesh.team]
        with self._for_sampling(len(prompts) * n * spec.max_new_tokens):
            found = sample(self.policy, [prompts[i] for i in mine], n, spec) if mine or not prompts else []
        places = [(c, mine[c.prompt_index]) for c in found]
        own = [Rollout.of(c, place, prompts[place], self.version, spec) for c, place in places]
        everyone = [rollout for rollouts in self.mesh.of_teams(own) for rollout in rollouts]
        return sorted(everyone, key=lambda r: (r.prompt_index, r.sample_index))

    @contextmanager
    def slots(self, spec: SampleSpec, tokens: int, max_rows: int) -> Iterator[SlotSampler]:
        """The live policy as a sampler that rows join at any time; about ``tokens`` will be sampled."""
        from earnest.models.slots import SlotSampler

        with self._for_sampling(tokens), evaluating(self.policy):
            yield SlotSampler(self.policy, spec, max_rows=max_rows, resume=True)

    @contextmanager
    def _for_sampling(self, tokens: int) -> Iterator[None]:
        """Merged weights save the adapter's kernels at every decoded token. In 16 bits they may round to another
        policy than the one that is trained, and a quantised layer has no dense weight: there the adapter stays beside
        its layer, as it does where too few tokens are sampled to pay for the merge. A sharded base is gathered."""
        if self.mesh.shard > 1:
            with whole(self.policy.model):
                yield
            return
        merge = self.team is None and self.adapter.merging_exact and self.adapter.mergeable
        merge = merge and self.adapter.merging_pays(tokens)
        with self.adapter.merged() if merge else nullcontext():
            yield

    @torch.no_grad()
    def score(self, batch: Batch, want: Wanted, policy: Who = "live") -> Tensor | Distribution:
        """Log-probs or distributions at the batch's active tokens: of the live policy, the base (every gate at 0), or
        the previous round (this adapter's gate at 0, frozen history as it is)."""
        batch = batch.to(self.policy.device)
        with self._as(policy):
            if isinstance(want, LogProbsWanted):
                need = LogProb(want.temperature)
                return self.scalars(batch, [need])[need].values
            shape = (batch.active.shape[0], self.policy.head.width)
            hidden = torch.zeros(shape, dtype=self.policy.dtype, device=batch.device)
            for part in self._cut(batch):
                states = self._hidden(part)
                if not part.spare:
                    hidden[part.token] = states
            self.mesh.sum_(hidden)
            # Still inside the block: the head may have an adapter, too.
            if isinstance(want, HiddenWanted):
                return Hidden(hidden)
            if isinstance(want, TopKWanted):
                return scoring.top_k(hidden, self.policy.head, want.k)
            if isinstance(want, AtIdsWanted):
                return scoring.at_ids(hidden, self.policy.head, want.ids.to(batch.device))
            return scoring.all_logits(hidden, self.policy.head)

    @contextmanager
    def _as(self, who: Who) -> Iterator[None]:
        """Inside the block the model is that policy. Without stacked adapters, base and previous are the same."""
        if who not in ("live", "base", "previous"):
            raise ConfigError(f"policy is {who!r}; score as 'live', 'base' or 'previous'.")
        policies = {"live": nullcontext, "base": lambda: without_adapters(self.policy), "previous": self.adapter.off}
        with policies[who]():
            yield
        self._free()

    def _free(self) -> None:
        """Free the weights that passes without a backward pass have gathered."""
        if self.mesh.shard > 1:
            free(self.policy.model)

    @torch.no_grad()
    def scalars(self, batch: Batch, needs: Sequence[Need]) -> Scalars:
        """The whole batch's scalars, without a graph."""
        batch = batch.to(self.policy.device)
        fields = self.parameter_fields(needs)
        if token_needs := passes.token_needs(needs):
            parts = [(part, self._fields(part, token_needs)) for part in self._cut(batch)]
            own = [(part.token, found) for part, found in parts if not part.spare]
            everyone = [piece for pieces in self.mesh.gathered(own) for piece in pieces]
            fields |= micro.join(everyone, batch.active.shape[0])
            self._free()
        return fields

    def backward(self, batch: Batch, weights: Mapping[Need, Tensor]) -> None:
        """Add Σ weights · ∂scalars/∂θ to the gradients; ``weights`` have the layout that ``scalars`` returns."""
        batch = batch.to(self.policy.device)
        with self.trained.summed(self.mesh):
            self._backward(batch, weights, self._cut(batch))

    def update(self) -> UpdateReport:
        """Clip, optimizer, guard, outer sync, in this order; clears the gradients and increases the version by 1."""
        without = [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
        if len(without) == len(self.names):
            raise ObjectiveError(
                "update() before any backward(): no parameter has a gradient. Call step(), or backward() first."
            )
        bound = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = self.trained.clip(bound)
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise ObjectiveError(
                f"the gradient norm is {norm} at version {self.version}; nothing was updated. "
                "Lower the learning rate or look for extreme ratios."
            )
        if (schedule := self.optimizer_spec.schedule) is not None:  # without one the rates stay as they are
            share = schedule.share(self.version + 1) if self.planned is None else self.planned
            set_rates(self.optimizer, self.optimizer_spec.lr * share)
        self.planned = None
        before = [p.detach().clone() for p in self.parameters]
        if self.guard is not None:
            self.guard.prepare(self.names, self.parameters)
        self.optimizer.step()
        with torch.no_grad():
            guard = self.guard.judge(self.names, before, self.parameters) if self.guard else {}
        length = self.trained.norm([p.detach() - b for p, b in zip(self.parameters, before, strict=True)])
        self.optimizer.zero_grad(set_to_none=True)
        if self.mesh.size > 1:
            self.trained.require_same()
        self.version += 1
        outer = self.outer.after_update(self) if self.outer else {}
        factor = min(1.0, bound / norm) if norm > 0 else 1.0
        return UpdateReport(norm, factor, length, self.version, dict(guard), dict(outer), self.learning_rate)

    def step(self, batch: Batch, objective: Objective | Term, *, shares: bool = False) -> StepReport:
        """Scalars, objective, backward and update in a row. ``shares`` also measures each term's own gradient, at the
        cost of one more pass per term."""
        objective = Objective.of(objective)
        batch = batch.to(self.policy.device)
        measured = self.gradient_shares(batch, objective) if shares else None
        done = self._accumulate(batch, objective)
        self.tokens += done.tokens
        report = report_of(objective, done, self.update(), measured)
        self.objective_state = objective.advance(self.objective_state, done.values)
        return report

    def gradients(self, batch: Batch, objective: Objective | Term) -> dict[str, Tensor]:
        """The gradient of an objective by every trainable parameter; the engine is unchanged afterwards."""
        return self.trained.whole(self.own_gradients(batch.to(self.policy.device), Objective.of(objective)))

    def own_gradients(self, batch: Batch, objective: Objective) -> list[Tensor]:
        """The gradient by every parameter as this rank holds it."""
        held = [p.grad for p in self.parameters]
        state = {label: dict(s) for label, s in self.objective_state.items()}
        for p in self.parameters:
            p.grad = None
        try:
            self._accumulate(batch, objective)
            return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, held, strict=True):
                p.grad = grad
            self.objective_state = state

    def gradient_shares(self, batch: Batch, objective: Objective) -> dict[str, tuple[float, float]]:
        """For every live term: the norm of its weighted gradient, and that norm as a share of the sum of norms."""
        norms = {}
        for weighted in objective.live():
            try:
                own = self.own_gradients(batch.to(self.policy.device), Objective((weighted,)))
            except NothingToTrain:  # idle
                continue
            norms[weighted.term.label] = self.trained.norm(own)
        total = sum(norms.values())
        return {label: (norm, norm / total if total else 0.0) for label, norm in norms.items()}

    def _accumulate(self, batch: Batch, objective: Objective) -> Pass:
        idle, needs, counts = objective.prepare(batch, self.objective_state)
        if self.estimator == "sampled":
            demand_ratio(batch, objective, self.objective_state, self.version, idle)
        local = [w.term.label for w in objective.live() if "batch_local" in w.term.laws]
        if local and self.mesh.size > 1:
            raise ObjectiveError(
                f"{local[0]}: divides by the tokens of each micro-batch, and {self.mesh.size} ranks cut the batch; "
                "train it in one process, or use dapo."
            )
        self.mesh.require_same("batches", [batch.inputs, batch.weight, *batch.tensors()])
        parts = self._cut(batch, bool(local))
        with self.trained.summed(self.mesh):
            if not objective.additive and (len(parts) > 1 or self.mesh.size > 1):
                passes.refuse_batch_local(objective, len(parts))
                fields = self.scalars(batch, needs)
                leaves = passes.leaves(fields)
                result = objective.evaluate(batch, leaves, self.objective_state, counts)
                self._backward(batch, passes.derivatives(result.loss, leaves), parts)
                ran, loss, values = "two passes", float(result.loss.detach()), dict(result.values)
            else:
                ran, found = "one pass", list[tuple[float, Mapping[str, Value]]]()
                for part in parts:
                    fields = self.parameter_fields(needs) | self._fields(part, passes.token_needs(needs))
                    leaves = passes.leaves(fields)
                    result = objective.evaluate(part.batch, leaves, self.objective_state, counts)
                    weights = {} if part.spare else passes.derivatives(result.loss, leaves)
                    self._propagate(fields, weights)
                    if not part.spare:
                        found.append((float(result.loss.detach()), passes.detached(result.values)))
                found = [each for own in self.mesh.gathered(found) for each in own]
                loss, values = sum(loss for loss, _ in found), passes.merge([values for _, values in found])
        sizes = self.mesh.of_teams((sum(p.computed for p in parts), sum(p.padding for p in parts)))
        computed, padding = (sum(size) for size in zip(*sizes, strict=True))
        layout = self.layouts.describe(parts) + ("" if self.compiled is None else f", {self.compiled.note}")
        return Pass(
            loss, values, idle, passes=ran, micro_batches=len(parts), tokens=batch.active.shape[0],
            computed_tokens=computed, padded_tokens=padding, layout=layout,
        )  # fmt: skip

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block every rank computes all rows by itself; for comparisons with the mesh's own result."""
        mesh = self.mesh
        self.mesh = self.layouts.mesh = Mesh(0, 1, mesh.shard)
        sum_over_ranks(self.policy.model, divided_by=mesh.size)
        try:
            with self.whole_layers():
                yield
        finally:
            self.mesh = self.layouts.mesh = mesh
            sum_over_ranks(self.policy.model)

    def whole_layers(self) -> AbstractContextManager[None]:
        """Inside the block a forward pass, with its backward pass, is not divided among the ranks of a team."""
        return nullcontext() if self.team is None else self.team.set_alone()

    def _backward(self, batch: Batch, weights: Mapping[Need, Tensor], parts: Sequence[micro.Micro]) -> None:
        total = batch.active.shape[0]
        token_needs = passes.token_needs(list(weights))
        for part in parts if token_needs else ():
            fields = self._fields(part, token_needs)
            ats = {n: passes.coverage(batch, n) for n in token_needs}
            own = {n: micro.slice_like(f, part, weights[n], ats[n], total) for n, f in fields.items()}
            self._propagate(fields, {} if part.spare else own)
        self._propagate(self.parameter_fields(list(weights)), weights)

    def _propagate(self, fields: Mapping[Need, Field], weights: Mapping[Need, Tensor]) -> None:
        """Backward from the fields with these derivatives; on several ranks also where all of them are missing."""
        if self.mesh.size > 1:
            weights = {n: weights[n] if n in weights else torch.zeros_like(f.values) for n, f in fields.items()}
        pairs = [(f.values, weights[n]) for n, f in fields.items() if n in weights and f.values.requires_grad]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [w.to(v.dtype) for v, w in pairs])

    def _hidden(self, part: micro.Micro) -> Float[Tensor, "n d"]:
        """The last hidden states at the active tokens of these rows."""
        if (own := part.together) is not None:  # the gradient of the other ranks' rows is added
            return own.team.whole_input(self._hidden(own.part))[own.places]
        if part.layout is not None:
            return part.layout.hidden(self.policy)
        return self.policy.hidden(part.batch.inputs)[part.batch.row, part.batch.position]

    def _fields(self, part: micro.Micro, needs: Sequence[Need]) -> dict[Need, Field]:
        if not needs:
            return {}
        found = vocabulary_scalars if self.estimator == "exact" else sampled_fields
        return dict(found(self._hidden(part), self.policy.head, part.batch, needs))

    def _cut(self, batch: Batch, same_rows: bool = False) -> list[micro.Micro]:
        return self.layouts.cut(batch, self.micro_tokens, same_rows=same_rows)

    def parameter_fields(self, needs: Sequence[Need]) -> dict[Need, Field]:
        """Scalars of the adapter, which depend on no batch, with their graph. The gradients of whole parameters are
        summed over the ranks, so those are rank 0's alone."""
        spectral = [n for n in needs if isinstance(n, SpectralNorm)]
        return {
            n: Field(spectral_norms(self.adapter, self.mesh.rank == 0), None, "subspace iteration") for n in spectral
        }

    def save(self, folder: Path | str) -> Path:
        """Write everything that the next step depends on; the folder is complete or not there. Rank 0 writes it."""
        return state.save(self, Path(folder))

    def load(self, folder: Path | str) -> None:
        """Continue from ``folder``. Raises first if the base model or optimizer differs, or if a tensor is missing."""
        state.load(self, Path(folder))

"""What the vocabulary pass costs, forward and backward, against plain PyTorch, TRL's functions and Liger's chunked
losses.

    python benchmarks/objectives.py [--tokens 1024 --width 1024 --vocabulary 151936] [--growth] [--smoke]
    python benchmarks/objectives.py --table          the markdown tables of the last run

Every measurement is a separate process. Peak memory is the kernel's (VmHWM, reset before the first run) minus the
memory of the inputs. Time is the best of the repeats; the bare matrix products that the maths needs are timed between
them, in the same process. The head is frozen and fp32. All sides get the same hidden states and compute the same
loss; if a library does not have it, the nearest loss that it has runs, and the note names it.

    grpo_kl   clipped ratio + k3 to given reference log-probs      1 log-prob                              2 products
    full_gjs  GJS_½ to a teacher's hidden states, all tokens       1 divergence, 1 source                  3
    topk_gjs  the same on the student's top 100 + tail bucket      1 divergence, 1 source                  3
    simpo     pairs of rows                                        1 log-prob                              2
    sum       grpo + top-K SDPO (half the rows) + simpo            1 + ½ + 1 forward, as many back         5
              + an rmse barrier of the full reverse KL
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CASES = ("grpo_kl", "full_gjs", "topk_gjs", "simpo", "sum")
IMPLS = ("earnest", "eager", "trl", "liger", "liger_compiled")
# products of N rows with the head that the maths needs: forward, backward
PRODUCTS = {"grpo_kl": (1, 1), "full_gjs": (2, 1), "topk_gjs": (2, 1), "simpo": (1, 1), "sum": (2.5, 2.5)}
ROWS, TOP_K = 8, 100
NOTES = {
    ("topk_gjs", "liger"): "has no top-K: full JSD",
    ("topk_gjs", "liger_compiled"): "has no top-K: full JSD",
    ("sum", "liger"): "four separate losses; full JSD instead of top-K, mean instead of rmse",
    ("sum", "liger_compiled"): "four separate losses; full JSD instead of top-K, mean instead of rmse",
    ("full_gjs", "liger"): "also makes the frozen head's gradient",
    ("full_gjs", "liger_compiled"): "also makes the frozen head's gradient",
}


class Inputs:
    """The same numbers for every side: ``ROWS`` rows, the first half rollouts, the second half two kinds of pair
    member.
    """

    def __init__(self, tokens: int, width: int, vocabulary: int, dtype: str) -> None:
        import torch

        g = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        self.N, self.d, self.V, self.T = tokens, width, vocabulary, tokens // ROWS
        self.weight = torch.empty(vocabulary, width, dtype=kind)
        for part in self.weight.split(4096):  # no second copy of the head
            part.copy_(torch.randn(part.shape, generator=g) * width**-0.5)
        self.hidden = torch.randn(tokens, width, generator=g).to(kind) * 3
        self.teacher = (self.hidden + torch.randn(tokens, width, generator=g).to(kind)).detach()
        self.reference = (self.hidden + 0.3 * torch.randn(tokens, width, generator=g).to(kind)).detach()
        self.targets = torch.randint(vocabulary, (tokens,), generator=g)
        self.advantages = torch.randn(ROWS, generator=g).repeat_interleave(self.T)
        self.old = self._logprobs() + 0.2 * torch.randn(
            tokens, generator=g
        )  # a little off-policy: some ratios are clipped
        self.ref_logps = self.old + 0.2 * torch.randn(tokens, generator=g)
        self.half = tokens // 2  # rollouts in front, then chosen rows, then rejected ones

    def _logprobs(self) -> Any:
        import torch

        parts = zip(self.hidden.split(64), self.targets.split(64), strict=True)
        return torch.cat([(h @ self.weight.t()).float().log_softmax(-1).gather(-1, y[:, None])[:, 0] for h, y in parts])


# --- the losses: functions of per-token scalars, the same for every side that has them --------------------------------


def grpo_kl(lp: Any, old: Any, ref: Any, advantages: Any) -> Any:
    ratio = (lp - old).exp()
    k3 = (ref - lp).exp() - (ref - lp) - 1
    return (-(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages) + 0.04 * k3).mean()


def simpo(lp: Any, T: int) -> Any:
    import torch

    rows = lp.view(-1, T).mean(-1)
    chosen, rejected = rows.chunk(2)
    return -torch.nn.functional.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()


def rmse_barrier(kl: Any) -> Any:
    return kl.square().mean().add(1e-12).sqrt()


def total(x: Inputs, lp: Any, sdpo: Any, kl: Any) -> Any:
    h = x.half
    return (
        grpo_kl(lp[:h], x.old[:h], x.ref_logps[:h], x.advantages[:h])
        + 0.5 * sdpo.mean()
        + 0.1 * simpo(lp[h:], x.T)
        + rmse_barrier(kl)
    )


# --- the sides --------------------------------------------------------------------------------------------------------


def from_scalars(case: str, x: Inputs, module: Any) -> Callable[[Any], Any]:
    """earnest's pass, or its eager version: one call for all scalars."""
    import torch

    from earnest.models.head import HeadSpec
    from earnest.objectives.needs import Divergence, LogProb
    from earnest.signals.batch import Batch, Reference, Teacher
    from earnest.signals.distributions import Hidden

    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(x.weight, requires_grad=False)
    head = HeadSpec(linear, None, None, tied=False)
    batch = Batch.from_rows([[0]] * ROWS, x.targets.view(ROWS, x.T).tolist())
    at = torch.arange(x.half) if case == "sum" else None
    batch = batch.with_signals(
        teacher=Teacher(Hidden(x.teacher if at is None else x.teacher[: x.half]), at),
        reference=Reference(distribution=Hidden(x.reference)),
    )
    lp, full = LogProb(), Divergence("teacher", 0.5)
    top = Divergence("teacher", 0.5, support="student", top_k=min(TOP_K, x.V - 1))
    reverse = Divergence("reference", 1.0)
    needs = {"grpo_kl": [lp], "simpo": [lp], "full_gjs": [full], "topk_gjs": [top], "sum": [lp, top, reverse]}[case]

    def loss(hidden: Any) -> Any:
        found = {n: f.values for n, f in module.scalars(hidden, head, batch, needs).items()}
        if case == "grpo_kl":
            return grpo_kl(found[lp], x.old, x.ref_logps, x.advantages)
        if case == "simpo":
            return simpo(found[lp], x.T)
        if case == "sum":
            return total(x, found[lp], found[top], found[reverse])
        return found[needs[0]].mean()

    return loss


def from_trl(case: str, x: Inputs) -> Callable[[Any], Any]:
    import torch
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo.loss_utils import (
        compute_full_logit_self_distillation_loss,
        compute_topk_self_distillation_loss,
    )
    from trl.trainer.utils import selective_log_softmax

    def other(states: Any) -> Any:
        with torch.no_grad():
            return states @ x.weight.t()

    def top(z: Any, t: Any) -> Any:
        k = min(TOP_K, x.V - 1)
        return compute_topk_self_distillation_loss(
            z, t, distillation_topk=k, distillation_alpha=0.5, distillation_add_tail=True
        )

    def loss(hidden: Any) -> Any:
        z = hidden @ x.weight.t()
        if case == "full_gjs":
            return GKDTrainer.generalized_jsd_loss(z[None], other(x.teacher)[None], beta=0.5, reduction="sum") / x.N
        if case == "topk_gjs":
            return top(z, other(x.teacher)).mean()
        lp = selective_log_softmax(z, x.targets)
        if case == "grpo_kl":
            return grpo_kl(lp, x.old, x.ref_logps, x.advantages)
        if case == "simpo":
            return simpo(lp, x.T)
        kl = compute_full_logit_self_distillation_loss(z, other(x.reference), distillation_alpha=1.0)
        return total(x, lp, top(z[: x.half], other(x.teacher[: x.half])), kl)

    return loss


def from_liger(case: str, x: Inputs, compiled: bool) -> Callable[[Any], Any]:
    import torch
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
    from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOLoss

    # Its chunk sizes count rows of text for grpo and simpo, tokens for jsd: 256 tokens as in the pass that it is
    # compared with.
    rows = max(1, 256 // x.T)
    grpo = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="bnpo", compiled=compiled, use_ref_model=True, chunk_size=rows)
    pairs = LigerFusedLinearSimPOLoss(
        beta=2.0, gamma=0.5, compute_nll_loss=False, compiled=compiled, chunk_size=max(1, rows // 2)
    )
    jsd = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=compiled, chunk_size=256
    )
    reverse = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=compiled, chunk_size=256
    )

    def shaped(t: Any, of: slice) -> Any:
        return t[of].view(-1, x.T, *t.shape[1:])

    def run_grpo(hidden: Any, of: slice) -> Any:
        mask = torch.ones_like(shaped(x.targets, of))
        advantages = shaped(x.advantages, of)[:, 0]
        out = grpo(
            shaped(hidden, of), x.weight, shaped(x.targets, of), mask, advantages,
            ref_per_token_logps=shaped(x.ref_logps, of), old_per_token_logps=shaped(x.old, of),
        )  # fmt: skip
        return out[0]

    def run_simpo(hidden: Any, of: slice) -> Any:
        return pairs(x.weight, shaped(hidden, of), shaped(x.targets, of))[0]

    def loss(hidden: Any) -> Any:
        everything, h = slice(None), x.half
        if case == "grpo_kl":
            return run_grpo(hidden, everything)
        if case == "simpo":
            return run_simpo(hidden, everything)
        if case in ("full_gjs", "topk_gjs"):
            return jsd(hidden, x.weight, x.teacher, x.weight, x.targets)
        sdpo = jsd(hidden[:h], x.weight, x.teacher[:h], x.weight, x.targets[:h])
        kl = reverse(hidden, x.weight, x.reference, x.weight, x.targets)
        return run_grpo(hidden, slice(0, h)) + 0.5 * sdpo + 0.1 * run_simpo(hidden, slice(h, None)) + kl

    return loss


def side(impl: str, case: str, x: Inputs) -> Callable[[Any], Any]:
    if impl in ("earnest", "eager"):
        from earnest.engines.vocabulary import eager, fused

        return from_scalars(case, x, fused if impl == "earnest" else eager)
    return from_trl(case, x) if impl == "trl" else from_liger(case, x, compiled=impl == "liger_compiled")


# --- one measurement, in its own process ------------------------------------------------------------------------------


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(job["threads"])
    clock = time.perf_counter if job["clock"] == "wall" else time.process_time
    warm = Inputs(64, 16, 256, job["dtype"])
    side(job["impl"], job["case"], warm)(warm.hidden.clone().requires_grad_()).backward()
    x = Inputs(job["tokens"], job["width"], job["vocabulary"], job["dtype"])
    loss = side(job["impl"], job["case"], x)

    def step() -> tuple[float, float, float]:
        hidden = x.hidden.clone().requires_grad_()
        start = clock()
        value = loss(hidden)
        value.backward()
        taken = clock() - start
        assert hidden.grad is not None
        return taken, float(value.detach()), float(hidden.grad.float().norm())

    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what making the inputs left behind would hide what the step takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    first, value, norm = step()
    peak = status("VmHWM") - before

    bare: list[tuple[float, float]] = []
    taken = [first] if job["impl"] != "liger_compiled" else []  # a first run that compiles is no measurement
    logits = torch.empty(x.N, x.V, dtype=x.weight.dtype)
    back = torch.empty(x.N, x.d, dtype=x.weight.dtype)
    for _ in range(job["repeats"]):
        start = clock()
        torch.mm(x.hidden, x.weight.t(), out=logits)
        middle = clock()
        torch.mm(logits, x.weight, out=back)
        bare.append((middle - start, clock() - middle))
        taken.append(step()[0])
    forward, backward = PRODUCTS[job["case"]]
    products = forward * min(f for f, _ in bare) + backward * min(b for _, b in bare)
    return {
        "seconds": min(taken),
        "all_seconds": taken,
        "products_seconds": products,
        "over_products": min(taken) / products,
        "peak_bytes": peak,
        "loss": value,
        "gradient_norm": norm,
        "note": NOTES.get((job["case"], job["impl"]), ""),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job["threads"]),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


# --- the report -------------------------------------------------------------------------------------------------------


def line(job: dict[str, Any], r: dict[str, Any]) -> str:
    name = f"{job['case']:9s} {job['impl']:15s} N={job['tokens']:<5d} V={job['vocabulary']:<7d}"
    if "error" in r:
        return f"{name} failed: {r['error'][:120]}"
    cost = f"{r['seconds']:8.2f} s {r['over_products']:6.2f}x products {r['peak_bytes'] / 2**20:9.0f} MiB"
    return f"{name} {cost}  loss {r['loss']:.5f} |g| {r['gradient_norm']:.3e}  {r['note']}"


def summary(results: dict[str, dict[str, Any]], cases: list[str]) -> dict[str, Any]:
    """Ratios to earnest: above 1 means that earnest needs less."""
    found: dict[str, Any] = {}
    for case in cases:
        mine = results[f"{case}/earnest"]
        row = {"over_products": mine.get("over_products")}
        for impl in IMPLS[1:]:
            other = results.get(f"{case}/{impl}", {"error": "not run"})
            if "error" not in other and "error" not in mine:
                row[impl] = {
                    "time": other["seconds"] / mine["seconds"],
                    "memory": other["peak_bytes"] / max(1, mine["peak_bytes"]),
                }
        found[case] = row
    return found


def tables(run: dict[str, Any]) -> str:
    """The main measurement and the growth, as markdown."""
    lines = [
        "| channel | side | s | over the bare products | MiB | time of earnest's | memory of earnest's |",
        "|---" * 7 + "|",
    ]
    for key, r in run["results"].items():
        case, impl = key.split("/")
        if "error" in r:
            continue
        mine = run["results"][f"{case}/earnest"]
        ratios = [r["seconds"] / mine["seconds"], r["peak_bytes"] / mine["peak_bytes"]]
        name = f"{impl} ({r['note']})" if r["note"] else impl
        cells = [case, name, f"{r['seconds']:.2f}", f"{r['over_products']:.2f}×", f"{r['peak_bytes'] / 2**20:,.0f}"]
        lines.append("| " + " | ".join(cells + ["" if impl == "earnest" else f"{x:.2f}×" for x in ratios]) + " |")
    if run["growth"]:
        lines += ["", "| channel | tokens | vocabulary | side | s | MiB |", "|---" * 6 + "|"]
    for r in run["growth"]:
        size = f"{r['case']} | {r['tokens']:,} | {r['vocabulary']:,} | {r['impl']}"
        lines.append(f"| {size} | {r['seconds']:.2f} | {r['peak_bytes'] / 2**20:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {ROWS * 2}")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="bfloat16 for bytes and values, not for time",
    )
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: seconds of the processor, where others work too"
    )
    parser.add_argument("--table", action="store_true", help="print --out as markdown instead of running")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--impls", default=",".join(IMPLS[:-1]), help="liger_compiled too, where its compiler gains")
    parser.add_argument(
        "--growth", action="store_true", help="also with tokens and with vocabulary, earnest against eager"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does everything run and agree?")
    parser.add_argument("--out", type=Path, default=RESULTS / "objectives.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(measure(json.loads(args.job))))
        return
    if args.table:
        print(tables(json.loads(args.out.read_text())))
        return
    if args.smoke:
        args.tokens, args.width, args.vocabulary, args.repeats = 128, 64, 2000, 1
    cases, impls = args.cases.split(","), args.impls.split(",")
    base = {k: getattr(args, k) for k in ("tokens", "width", "vocabulary", "threads", "repeats", "dtype", "clock")}
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    before = before if before.get("settings", {}) | {"repeats": 0} == base | {"repeats": 0} else {}
    # What is not measured now stays, if it was measured at the same sizes: a case at a time can be run again.
    results: dict[str, dict[str, Any]] = before.get("results", {})
    for case in cases:
        for impl in impls:
            job = {**base, "case": case, "impl": impl}
            results[f"{case}/{impl}"] = run(job)
            print(line(job, results[f"{case}/{impl}"]), flush=True)
    cases = [case for case in CASES if f"{case}/earnest" in results]
    growth: list[dict[str, Any]] = [] if args.growth else before.get("growth", [])
    sizes = [
        (args.tokens // 4, args.vocabulary),
        (args.tokens // 2, args.vocabulary),
        (args.tokens, args.vocabulary // 4),
        (args.tokens, args.vocabulary // 2),
    ]
    for case in ("grpo_kl", "full_gjs") if args.growth else ():
        for tokens, vocabulary in sizes:
            for impl in ("earnest", "eager"):
                job = {**base, "case": case, "impl": impl, "tokens": tokens, "vocabulary": vocabulary}
                result = run(job)
                print(line(job, result), flush=True)
                growth.append({**job, **result})
    ratios = summary(results, cases)
    print("\nratio to earnest (above 1: earnest needs less)")
    for case, row in ratios.items():
        others = "  ".join(
            f"{i} {r['time']:.2f}x time {r['memory']:.1f}x memory" for i, r in row.items() if isinstance(r, dict)
        )
        print(f"  {case:9s} {row['over_products'] or float('nan'):.2f}x its products | {others}")
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(
            {"settings": base, "machine": machine, "results": results, "ratios": ratios, "growth": growth}, indent=1
        )
    )
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()

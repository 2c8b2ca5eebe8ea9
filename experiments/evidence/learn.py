"""Does it learn? SmolLM2-135M-Instruct with a LoRA by GRPO on two tasks of reasoning-gym, and the same job in TRL.

    python -m experiments.evidence.learn                       what is missing; then JSON, tables and figure
    python -m experiments.evidence.learn --only chain_sum      one task
    python -m experiments.evidence.learn --table

The base answers in sentences, so it solves nothing as it is graded. A short supervised start on the task's training
split (the same for all seeds and for TRL) teaches the form of an answer; its merged weights are the policy "before".
Both trainers get the same model, LoRA, rate, group size, temperature and number of steps, one thread each, and are
measured by the same evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.evidence import runs
from experiments.evidence.jobs import Jobs, Record, by, main, plots, spread, table

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "gcd": {"min_value": 2, "max_value": 30},
}
SEEDS = (0, 1, 2)
STEPS, PROMPTS, COMPLETIONS, NEW_TOKENS, RANK, ALPHA, LR = 40, 4, 8, 6, 8, 16.0, 3e-4
WARM_STEPS, WARM_ROWS, WARM_LR = 12, 8, 1e-3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(task: str, model: str, seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "threads": 1,
        "task": {"name": f"reasoning_gym/{task}", **TASKS[task]},
        "adapter": {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": TARGETS},
        "objective": [{"kind": "grpo", "clip": 0.2}],
        "optimizer": {"kind": "adamw", "lr": LR},
        "sampling": {
            "prompts_per_step": PROMPTS,
            "completions_per_prompt": COMPLETIONS,
            "max_new_tokens": NEW_TOKENS,
            "temperature": 1.0,
        },
        "steps": STEPS,
        "seed": seed,
        "eval": {"every": STEPS, "prompts": 64, "samples": 2},
        "checkpoint": {"every": 10, "keep": 1},
        "check": False,
    }


def warm(task: str, out: Path) -> str:
    """The folder of the model after the supervised start."""
    given = config(task, "smollm2", 1000) | {
        "objective": [{"kind": "sft"}],
        "optimizer": {"kind": "adamw", "lr": WARM_LR},
        "steps": WARM_STEPS,
    }
    given["sampling"] |= {"prompts_per_step": WARM_ROWS}
    given["eval"] = {"every": WARM_STEPS, "prompts": 32, "samples": 1}
    return str(runs.merged(runs.finish(out / f"{task}-warm", given)).resolve())


def ours(task: str, seed: int, out: Path) -> Record:
    found = runs.read(runs.finish(out / f"{task}-earnest-seed{seed}", config(task, warm(task, out), seed)))
    return {"task": task, "trainer": "earnest", "seed": seed, **found}


def theirs(task: str, seed: int, out: Path) -> Record:
    """TRL's GRPOTrainer; "before" is the same model on the same prompts, so it is measured once, by earnest's run."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from earnest.tasks import get_task

    torch.set_num_threads(1)
    set_seed(seed)
    folder = warm(task, out)
    asked = get_task(f"reasoning_gym/{task}", TASKS[task])
    prompts = {str(p.messages[-1]["content"]): p for p in asked.prompts("train", STEPS * PROMPTS, seed)}

    def reward(prompts_: Any = None, completions: Any = None, **more: Any) -> list[float]:
        given = more.get("prompts", prompts_)
        return [
            asked.grade(prompts[p[-1]["content"]], c[-1]["content"]).reward
            for p, c in zip(given, completions, strict=True)
        ]

    settings = trl.GRPOConfig(
        output_dir=str(out / f"{task}-trl-seed{seed}"), max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS,
        max_completion_length=NEW_TOKENS, temperature=1.0, beta=0.0, loss_type="grpo", learning_rate=LR,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, use_cpu=True, report_to=[],
        save_strategy="steps", save_steps=5, save_total_limit=1,
        disable_tqdm=True, seed=seed, bf16=False, fp16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": [dict(m) for m in p.messages]} for p in prompts.values()]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
        reward_funcs=reward,
    )
    place = out / f"{task}-trl-seed{seed}"
    trainer.train(resume_from_checkpoint=True if list(place.glob("checkpoint-*")) else None)
    lines = [line for line in trainer.state.log_history if "reward" in line]
    trained = place / "merged"
    trainer.model.merge_and_unload().save_pretrained(trained)
    AutoTokenizer.from_pretrained(folder).save_pretrained(trained)
    return {
        "task": task,
        "trainer": "TRL",
        "seed": seed,
        "version": trl.__version__,
        "heldout": [measured(task, folder, 0), measured(task, str(trained.resolve()), STEPS)],
        "reward": [line["reward"] for line in lines],
        "step_seconds": [line["step_time"] for line in lines],
    }


def measured(task: str, model: str, step: int) -> tuple[int, float, float | None, float | None]:
    """The evaluation of a run, on a model without a trained adapter."""
    from earnest.config import RunConfig
    from earnest.runs.evaluate import evaluate
    from earnest.runs.setup import build

    setup = build(RunConfig.model_validate(config(task, model, 0)), lambda _: None)
    found = evaluate(setup, step)
    return step, found.value, found.se, found.correct


def constant(task: str) -> Record:
    """The control: the best answer that does not read the question, the commonest one of the held-out prompts."""
    from collections import Counter

    from earnest.runs.evaluate import HELDOUT_SEED
    from earnest.tasks import get_task

    asked = get_task(f"reasoning_gym/{task}", TASKS[task])
    prompts = asked.prompts("heldout", config(task, "", 0)["eval"]["prompts"], HELDOUT_SEED)
    answer, _ = Counter(str(p.data["answer"]) for p in prompts).most_common(1)[0]
    grades = [asked.grade(p, answer) for p in prompts]
    reward, solved = (sum(values) / len(grades) for values in ([g.reward for g in grades], [g.correct for g in grades]))
    return {"task": task, "trainer": f"always {answer}", "seed": 0, "heldout": [(0, reward, None, solved)]}


def jobs(out: Path) -> Jobs:
    found: dict[str, Callable[[], Record]] = {f"{task}-constant": partial(constant, task) for task in TASKS}
    for seed in SEEDS:
        for task in TASKS:
            found[f"{task}-earnest-seed{seed}.result"] = partial(ours, task, seed, out)
            found[f"{task}-trl-seed{seed}.result"] = partial(theirs, task, seed, out)
    return found


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def tables(records: Sequence[Record]) -> list[str]:
    rows: list[list[object]] = []
    for task, own in by(records, "task").items():
        for trainer, found in by(own, "trainer").items():
            if "reward" not in found[0]:
                _, reward, _, solved = found[0]["heldout"][0]
                rows.append([task, trainer, "–", "–", f"{reward:.3f}", f"{solved:.3f}", "–", "–", "–", "–"])
                continue
            before, after = ([r["heldout"][i][1] for r in found] for i in (0, -1))
            right = [r["heldout"][-1][3] for r in found]
            last = [sum(r["reward"][-10:]) / 10 for r in found]
            seconds, cpu = [median(r["step_seconds"]) for r in found], [r["cpu_seconds"] / 60 for r in found]
            rows.append(
                [task, trainer, len(found), spread(before, 3), spread(after, 3), spread(right, 3),
                 spread([b - a for a, b in zip(before, after, strict=True)], 3), spread(last, 3), spread(seconds, 1),
                 spread(cpu, 1)]
            )  # fmt: skip
    header = [
        "task", "trainer", "seeds", "held-out reward before", "after", "solved after", "gain",
        "training reward, last 10 steps", "seconds per step, median", "CPU minutes of the job",
    ]  # fmt: skip
    return [table(header, rows)]


def figure(records: Sequence[Record], path: Path) -> None:
    tasks = {task: own for task, own in by(records, "task").items() if any("reward" in r for r in own)}
    made, axes = plots(len(tasks))
    colours = {"earnest": "#0072b2", "TRL": "#d55e00"}
    for axis, (task, own) in zip(axes, tasks.items(), strict=True):
        for trainer, found in by(own, "trainer").items():
            if "reward" not in found[0]:
                axis.axhline(found[0]["heldout"][0][1], color="#888888", linestyle=":", label=trainer)
                continue
            for number, r in enumerate(found):
                smooth = [sum(r["reward"][max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(r["reward"]))]
                label = f"{trainer}, training (mean of 5 steps)" if number == 0 else None
                axis.plot(range(1, len(smooth) + 1), smooth, color=colours[trainer], alpha=0.5, label=label)
                ends = [(e[0], e[1], e[2]) for e in r["heldout"]]
                shift = 0.8 * number + (0.4 if trainer == "TRL" else 0.0)  # so that no two points hide each other
                axis.errorbar(
                    [e[0] + shift for e in ends], [e[1] for e in ends], yerr=[e[2] for e in ends], fmt="o", capsize=3,
                    color=colours[trainer], label=f"{trainer}, held out (± s.e.)" if number == 0 else None,
                )  # fmt: skip
        axis.set(xlabel="step", ylabel="reward", title=f"reasoning_gym/{task}")
        axis.legend(fontsize=8)
    made.savefig(path)


if __name__ == "__main__":
    main("learn", jobs, tables, figure)

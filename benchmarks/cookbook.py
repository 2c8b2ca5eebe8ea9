"""Three unmodified tinker-cookbook recipes against `earnest serve`, with nano as the model; stores their output.

    python benchmarks/cookbook.py [--small] [--out benchmarks/results/cookbook]

The server runs in this environment, the recipes in .venv-cookbook (`make environments` makes it). They do not import
earnest: TINKER_BASE_URL points to the server, and the tokenizer of ``earnest/nano`` is registered through
the cookbook's own function. Supervised chat learns to sort digits from a local .jsonl, RL adds numbers in the
cookbook's arithmetic environment, prompt distillation writes numbers backwards, from a local file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "tests" / "tinker" / "cookbook_run.py"
PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"
NANO = ROOT / "src" / "earnest" / "models" / "nano"
COMMON = ("model_name=earnest/nano", "renderer_name=qwen3_instruct", "lora_rank=8", "behavior_if_log_dir_exists=delete")
WATCHED = {"chat_sl": "train_mean_nll", "math_rl": "env/all/reward/total", "prompt_distillation": "train_mean_nll"}


def recipes(folder: Path, small: bool) -> dict[str, list[str]]:
    """The command lines, by recipe."""
    # nano solves next to none of these sums: few samples might all get one reward, and then nothing is trained.
    sizes = {"batch_size": 4 if small else 32, "groups": 8 if small else 16, "group": 16 if small else 8}
    rows = 8 if small else 256
    supervised = [f"batch_size={sizes['batch_size']}", "max_length=256", "learning_rate=3e-3", "num_epochs=1"]
    return {
        "chat_sl": [f"dataset={write_data(folder, 'sort', rows)}", *supervised],
        "math_rl": [
            "env=arithmetic",
            f"group_size={sizes['group']}",
            f"groups_per_batch={sizes['groups']}",
            f"max_steps={2 if small else 4}",
            "max_tokens=6",
            "learning_rate=1e-4",
        ],
        "prompt_distillation": [f"file_path={write_data(folder, 'reverse', rows)}", *supervised],
    }


def write_data(folder: Path, task: str, rows: int) -> Path:
    """A task's prompts and right answers as a file of conversations."""
    import earnest as en
    from earnest.tasks import PromptStream

    file = folder / f"{task}.jsonl"
    with file.open("w") as out:
        for prompt in PromptStream(en.get_task(task), 5).next(rows):
            messages = [*prompt.messages, {"role": "assistant", "content": str(prompt.data["answer"])}]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


@contextmanager
def served(data: Path) -> Iterator[str]:
    """`earnest serve` as a process of its own; its address."""
    command = [sys.executable, "-m", "earnest.cli", "serve", "--port", "0", "--data", str(data), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        yield found.group()
    finally:
        process.terminate()
        process.wait()


def run(name: str, words: list[str], url: str, log: Path) -> str:
    """One recipe to its end; what it printed."""
    environment = os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    module = f"tinker_cookbook.recipes.{name}.train"
    command = [str(PYTHON), str(LAUNCHER), str(NANO), module, *COMMON, *words, f"log_path={log}"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--small", action="store_true", help="a few rows and steps: does it run")
    words.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cookbook")
    given = words.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    table = ["| recipe | steps | metric | first | last |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as temporary, served(Path(temporary) / "data") as url:
        for name, line in recipes(Path(temporary), given.small).items():
            log = Path(temporary) / name
            printed = run(name, line, url, log)
            printed = re.sub(r"\x1b\[[0-9;]*m", "", printed)
            (given.out / f"{name}.txt").write_text(printed.replace(temporary, "TEMPORARY").replace(str(ROOT), "."))
            metrics = [json.loads(m) for m in (log / "metrics.jsonl").read_text().splitlines()]
            watched = [m[WATCHED[name]] for m in metrics if WATCHED[name] in m]
            (given.out / f"{name}.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
            table.append(f"| {name} | {len(watched)} | {WATCHED[name]} | {watched[0]:.3f} | {watched[-1]:.3f} |")
    print("\n".join(table))


if __name__ == "__main__":
    main()

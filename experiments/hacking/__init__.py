"""`earnest run hacking`: does a guard keep a policy from learning to cheat, and would anything else do as well?

Jobs are trained one after the other, each into its own file under ``jobs/``. A second call keeps finished jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.hacking.config import Config as Config
from experiments.hacking.plan import Job, plan

if TYPE_CHECKING:
    from earnest_audit import Verdict

TEACHER = "teacher.safetensors"


def start(config: Config, *, full: bool, folder: Path, console: Console) -> Path:
    """Train what is left, then write the tables, the figure and the page."""
    import torch

    torch.set_num_threads(config.threads)
    jobs = plan(config, full)
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        whole = bar.add_task("jobs", total=len(jobs))
        for number, job in enumerate(jobs, 1):
            record = place(folder, job)
            if not record.exists():
                shown = bar.add_task(job.name, total=config.steps)
                _train(config, job, folder, lambda step, shown=shown: bar.update(shown, completed=step))
                bar.remove_task(shown)
                if not console.is_terminal:
                    console.print(f"{number}/{len(jobs)} {job.name}", highlight=False, markup=False)
            bar.update(whole, completed=number)
    from experiments.hacking.page import write_page

    return write_page(folder, config, jobs, full)


def prove(config: Config, *, quick: bool, progress: Callable[[str], None]) -> Verdict:
    """The step of every arm, proved."""
    from experiments.hacking.check import prove as prove_arms

    return prove_arms(config, quick=quick, progress=progress)


def place(folder: Path, job: Job) -> Path:
    return folder / "jobs" / f"{job.name}.json"


def _train(config: Config, job: Job, folder: Path, tell: Any) -> None:
    from safetensors.torch import save_file

    from earnest.disk import write_json
    from experiments.hacking.train import run_job

    done = run_job(config, job, _pool(config, folder) if job.pool else None, tell)
    if job.arm == "none" and job.seed == config.seed and not job.pool:
        save_file(done.parameters, folder / TEACHER)
    write_json(place(folder, job), done.record)


def _pool(config: Config, folder: Path) -> Any:
    """The teacher pool, which is sampled once and stored."""
    from safetensors.torch import load_file

    from experiments.hacking.pool import Pool, fill
    from experiments.hacking.train import make_engine

    path = folder / "pool.json"
    if not path.exists():
        teacher = make_engine(config, config.seed, None)
        teacher.adapter.load_state_dict(load_file(folder / TEACHER))
        fill(teacher, config).write(path)
    return Pool.read(path)

"""torchtune's recipes, whole, on a small Llama on the CPU: their loss, an update by their own loop, and a resume from
their own checkpoint. What a config names (dataset, tokenizer) is below; model, loss, checkpointer are torchtune's."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from earnest_audit import Resume, Step, Update
from earnest_audit.frontends import recipe

Named = Iterator[tuple[str, Callable[[], Any]]]
SIZES = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 64}
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 2, "lora_alpha": 4}
ROWS, EPOCHS = 8, 100
CHANGES: dict[str, str] = {}
"""Made in a recipe's source before it is run: what corrects it."""


class Tokenizer:
    pad_id = 0


class Dataset:
    """Sixteen rows of different lengths; the first tokens of each are a prompt. ``seen``: the rows that were read."""

    def __init__(self, tokenizer: Any, packed: bool = False) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.seen.append(index)
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 32, (6 + index % 5,), generator=generator).tolist()
        prompt = 2 + index % 3
        return {"tokens": tokens, "labels": [-100] * prompt + tokens[prompt:]}


class Logger:
    """Logs nothing."""

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, values: Any, step: int) -> None:
        pass


class Stop(Exception):
    """A recipe trains until its last epoch; this ends it before that."""


def configured(name: str, folder: Path, resumes: bool = False) -> Any:
    """A recipe after its ``setup``."""
    omega = import_module("omegaconf").OmegaConf
    lora = name != "full_finetune_single_device"
    start = folder.parent / "start"
    start.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        for file, seed in (("base.pt", 0), ("teacher.pt", 1)):
            torch.manual_seed(seed)
            torch.save(import_module("torchtune.models.llama3").llama3(**SIZES).state_dict(), start / file)

    def checkpointer(file: str, out: Path) -> dict[str, Any]:
        return {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(start),
            "checkpoint_files": [file], "output_dir": str(out), "model_type": "LLAMA3", "recipe_checkpoint": None,
        }  # fmt: skip

    saved = [] if lora else sorted(folder.glob("epoch_*/*.bin"))
    base = str(saved[-1].relative_to(folder)) if resumes and saved else "base.pt"
    model = {"_component_": "torchtune.models.llama3.llama3", **SIZES}
    chunked = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    cfg = omega.create(
        {
            "output_dir": str(folder), "device": "cpu", "dtype": "fp32", "seed": 3, "shuffle": True, "batch_size": ROWS,
            "epochs": EPOCHS, "max_steps_per_epoch": None, "gradient_accumulation_steps": 1, "optimizer_in_bwd": False,
            "compile": False, "resume_from_checkpoint": resumes, "enable_activation_checkpointing": False,
            "enable_activation_offloading": False, "clip_grad_norm": None, "log_peak_memory_stats": False,
            "model": {**model, "_component_": "torchtune.models.llama3.lora_llama3", **LORA} if lora else model,
            "teacher_model": model, "checkpointer": checkpointer(base, folder),
            "teacher_checkpointer": checkpointer("teacher.pt", folder / "teacher"),
            "tokenizer": {"_component_": f"{__name__}.Tokenizer"}, "dataset": {"_component_": f"{__name__}.Dataset"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                             "num_warmup_steps": 4},
            "loss": {"_component_": chunked},
            "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}, "kd_ratio": 0.5,
            "metric_logger": {"_component_": f"{__name__}.Logger"},
        }
    )  # fmt: skip
    script = Path(import_module("torchtune").__file__ or "").parents[1] / "recipes" / f"{name}.py"
    source = script.read_text(encoding="utf-8")
    defined: dict[str, Any] = {"__name__": name}
    for old, new in CHANGES.items():
        source = source.replace(old, new)
    exec(compile(source, str(script), "exec"), defined)  # the folder refuses to be imported
    (kind,) = [k for n, k in defined.items() if n.endswith("RecipeSingleDevice")]
    kind.train.__globals__["tqdm"] = partial(kind.train.__globals__["tqdm"], disable=True)
    made = kind(cfg=cfg)
    made.setup(cfg=cfg)
    return made


def batch() -> dict[str, Tensor]:
    collate, rows = import_module("torchtune.data").padded_collate_sft, Dataset(None)
    return dict(collate([rows[i] for i in range(ROWS // 2)], padding_idx=0, ignore_idx=-100))


def loss_of(owner: Any) -> Callable[[dict[str, Any]], Any]:
    """The loss whose gradient the recipe's loop takes."""

    def mixed(batch: dict[str, Any]) -> Any:
        found = owner._loss_step(batch)
        if isinstance(found, tuple):  # cross-entropy and divergence
            return (1 - owner._kd_ratio) * found[0] + owner._kd_ratio * found[1]
        return found

    return mixed


def step_of(owner: Any) -> Step:
    owner.audited = loss_of(owner)
    return recipe(
        owner, batch(), call="audited", roles={"ids": "tokens", "labels": "labels"}, reduction="mean",
        optimizer=owner._optimizer, family="sft",
    )  # fmt: skip


def update_of(owner: Any) -> Update:
    """One update by the recipe's own ``train()``."""

    def update(batches: Sequence[Mapping[str, Any]], max_grad_norm: float) -> None:
        data = list(map(dict, batches))
        owner._dataloader = type("Data", (list,), {"sampler": SimpleNamespace(set_epoch=lambda _: None)})(data)
        owner._gradient_accumulation_steps, owner._clip_grad_norm = len(data), max_grad_norm
        owner.epochs_run, owner.total_epochs = 0, 1
        owner.save_checkpoint = lambda epoch: None
        owner.train()

    return Update(owner._model, owner._optimizer, update, lambda _, rows: loss_of(owner)(dict(rows)), batch())


def resume_of(name: str, folder: Path) -> Resume:
    """N epochs are the steps; a recipe saves at an epoch's end."""

    def run(owner: Any, epochs: int) -> list[int]:
        last, data = owner.epochs_run + epochs, owner._dataloader.dataset
        data.seen.clear()

        def stop(epoch: int) -> None:
            if epoch + 1 == last:
                raise Stop

        owner.save_checkpoint = stop
        with suppress(Stop):
            owner.train()
        return list(data.seen)

    def save(owner: Any, into: Path) -> None:
        owner._checkpointer._output_dir = into
        type(owner).save_checkpoint(owner, epoch=owner.epochs_run - 1)

    def state(owner: Any) -> Tensor:
        moments = [m for s in owner._optimizer.state.values() for m in s.values() if isinstance(m, Tensor)]
        return torch.cat([t.detach().flatten().float() for t in (*owner._model.state_dict().values(), *moments)])

    return Resume(
        lambda: configured(name, folder), run, save, lambda _, saved: configured(name, saved, True), state, steps=2
    )


def torchtune_recipes() -> Named:
    logging.disable(logging.WARNING)
    for name in ("full_finetune_single_device", "lora_finetune_single_device", "knowledge_distillation_single_device"):
        folder = Path(tempfile.mkdtemp()) / "run"
        yield f"{name}: loss", lambda n=name, f=folder: step_of(configured(n, f))
        yield f"{name}: update", lambda n=name, f=folder: update_of(configured(n, f))
        yield f"{name}: resume", lambda n=name, f=folder: resume_of(n, f)

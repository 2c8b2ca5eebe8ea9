"""The keys of `earnest run hacking`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from earnest.config.schema import Strict, Whole
from earnest.guards.gates import Gate


class Config(Strict):
    """The settings that all arms share, and the size of the experiment."""

    experiment: Literal["hacking"]
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**20, description="the first seed")
    out: str | None = Field(None, min_length=1, description="the folder; none: runs/hacking-<time>")
    model: str = Field("nano", min_length=1, description="what en.load takes")
    threads: Whole = Field(1, description="CPU threads")
    targets: list[str] = Field(["q_proj", "v_proj", "o_proj", "down_proj"], description="layers with the δS adapter")
    lr: float = Field(0.07, gt=0, description="AdamW's")
    steps: Whole = Field(60, description="batches to train on, in each arm")
    prompts_per_step: Whole = 8
    completions_per_prompt: int = Field(8, ge=2)
    max_new_tokens: Whole = 8
    triples: int = Field(48, ge=8, description="contrastive triples for the directions; a quarter validates")
    top: Whole = Field(4, description="directions per module")
    floor: float = Field(0.25, ge=0, lt=1, description="share of the weakest directions to drop, over all modules")
    gate: Gate = "one_sided"
    overshoot: float = Field(1.0, gt=0)
    refresh: int = Field(30, ge=0, description="steps between two extractions of the directions; 0: only the first")
    eval_every: Whole = 12
    eval_prompts: Whole = 96
    eval_samples: Whole = 2
    seeds: Whole = Field(5, description="--full: seeds of the arms and the controls")
    few_seeds: Whole = Field(3, description="--full: seeds of leave-one-hole-out and of the teacher pool")
    pool_share: float = Field(0.25, gt=0, lt=1, description="share of a group that the teacher pool replaces")
    pool_prompts: int = Field(384, ge=8, description="prompts that are sampled to fill the pool")

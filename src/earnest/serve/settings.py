"""The settings of a server."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1", "[::1]")


class LearnLimits(BaseModel):
    """Upper limits of an adapter's `learn` settings from clients. A key may have its own in the file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int = Field(32, ge=1, description="optimizer steps per version")
    rank: int = Field(256, ge=1, description="the adapter's rank, and any other whole number among its settings")
    batch: int = Field(64, ge=1, description="feedbacks per version")
    micro_tokens: int = Field(4096, ge=1, description="padded tokens in one forward pass")
    terms: int = Field(8, ge=1, description="terms of the objective")
    prompts: int = Field(32, ge=1, description="the gate's probes")
    pairs: int = Field(64, ge=0, description="the gate's held-out pairs")
    samples: int = Field(8, ge=2, description="completions of each probe")
    max_new_tokens: int = Field(128, ge=1, description="length of a probe's completion")
    characters: int = Field(2000, ge=1, description="length of each text: probes, pairs, texts for thumbs")


class ServeSettings(BaseModel):
    """One process, one port, one base model, any number of adapters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(
        "127.0.0.1", min_length=1, description="the address to listen on; beyond loopback, keys are needed"
    )
    port: int = Field(8000, ge=0, le=65535, description="0: any free one, which the first line of output names")
    model: str = Field("nano", min_length=1, description="`nano`, `smollm2`, a Hugging Face id, or a folder")
    device: str = Field("auto", min_length=1, description="`auto` (CUDA, else MPS, else CPU) or a torch device")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="precision of the base model")
    threads: int | None = Field(None, ge=1, description="CPU threads; none: torch's choice")
    data: Path = Field(Path("earnest-data"), description="the folder of the database and of all versions")
    keys: Path | None = Field(None, description="a YAML file of API keys; none: no keys, and then loopback only")
    learn: Path | None = Field(None, description="a YAML file with the `learn` settings; none: SDPO with hindsight")
    client_learn: bool = Field(True, description="whether requests may set how their adapters learn (`learn`)")
    adapters: tuple[str, ...] = Field(("assistant",), description="adapters that exist from the start")
    max_body: int = Field(1 << 20, ge=1024, description="bytes of a request's body")
    max_upload: int = Field(256 << 20, ge=1024, description="bytes of an adapter that is pushed here")
    max_rows: int = Field(32, ge=1, description="sequences that are decoded together")
    max_waiting: int = Field(256, ge=1, description="sequences that may wait for a place; beyond, 429")
    max_tokens: int = Field(256, ge=1, description="length of an answer if the request gives none")
    max_queued: int = Field(1000, ge=1, description="feedback that may wait for an adapter's learner; beyond, 429")
    max_resident: int = Field(16, ge=2, description="adapters kept in memory; unused ones leave, oldest use first")
    keep_days: float | None = Field(
        None,
        gt=0,
        description="days after which conversations are deleted, unless their feedback is queued; none: never",
    )
    max_streams: int = Field(32, ge=1, description="streams of events per key; beyond, 429")
    header_wait: float = Field(20.0, gt=0, description="seconds that a connection gets to send a request's headers")
    body_wait: float = Field(30.0, gt=0, description="seconds for a body, and one more per 16 KiB; then 408")
    load_wait: float = Field(120.0, gt=0, description="seconds that a chat waits for the model to be loaded; then 503")
    shutdown_wait: int = Field(10, ge=1, description="seconds that answers under way get to finish at shutdown")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host in LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

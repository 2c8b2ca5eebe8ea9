"""The samplers of a config: processes here, Ray actors, servers, or processes that share only a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from rich.console import Console

from earnest.adapters import LoRA, attach
from earnest.config import RunConfig, dump, from_mapping
from earnest.config.loading import check_mapping
from earnest.config.schema import SamplerConfig, Strict
from earnest.config.text import parse
from earnest.engines import LocalEngine
from earnest.errors import SamplingError
from earnest.models import load
from earnest.store import Bucket
from earnest.sync import bucket as buckets
from earnest.sync.pool import SamplerPool
from earnest.tasks import Environment, Task, get_task
from earnest_audit import Verdict

PROBES = 4
"""Held-out prompts whose tokens are the probe."""
MOST_WAITING = 4096
"""Sequences that may wait at the run's own server: those of the run, and of other programs."""


def sampling_engine(config: str) -> LocalEngine:
    """The engine of a sampler's process: the run's policy with its adapter at initialization."""
    from earnest.runs.setup import adapted

    made = from_mapping(parse(config, "the run's config"))
    torch.set_num_threads(made.threads or 1)
    task = None if made.task is None else get_task(made.task.name, made.task.fields)
    return LocalEngine(*adapted(made, task, lambda _: None))


def samplers_of(
    config: RunConfig, task: Task | Environment, engine: LocalEngine, say: Callable[[str], None]
) -> SamplerPool | None:
    """The samplers of this run, which follow ``engine``; None: the engine samples. Rank 0 has those of all ranks."""
    policy, wanted = engine.policy, config.sampler or SamplerConfig()
    if wanted.url is None and wanted.port is None and not wanted.staleness and not config.sampling.workers:
        return None
    rows = [list(policy.render(p.messages)) for p in task.prompts("heldout", PROBES, 0)]
    if engine.mesh.rank:
        return SamplerPool(engine, rows, [])
    pool = partial(SamplerPool, engine, rows, staleness=wanted.staleness, partial=wanted.partial)
    make = partial(sampling_engine, dump(config))
    if config.sampling.workers:
        from earnest.sync import ray

        say(f"starting {config.sampling.workers} samplers on Ray")
        return pool(*ray.start(config.sampling.workers, make, 1.0 if policy.device.type == "cuda" else 0.0))
    if wanted.port is not None:
        from earnest.sync.own_server import OwnServer
        from earnest.sync.server import Server
        from earnest.sync.servers import ServerSampler

        settings = {"model": config.model, "device": config.device, "dtype": config.dtype, "threads": config.threads}
        own = OwnServer(settings | {"port": wanted.port, "adapters": (), "max_waiting": MOST_WAITING})
        say(f"sampling at {own.url}; other programs find the newest weights there as the model `pushed`")
        return pool([ServerSampler(Server(own.url, timeout=wanted.timeout))], own.close)
    if wanted.url is None:
        from earnest.sync.process import ProcessSampler

        say(f"starting {wanted.count} sampler processes")
        return pool([ProcessSampler(i, make) for i in range(wanted.count)])
    say(f"looking for the sampler at {wanted.url}")
    if wanted.url.startswith(("http://", "https://")):
        from earnest.sync.server import Server
        from earnest.sync.servers import ServerSampler

        secret = os.environ.get(wanted.key, "").strip()
        server = Server(wanted.url, folder=wanted.folder, key=wanted.key, secret=secret, timeout=wanted.timeout)
        return pool([ServerSampler(server)])
    bucket = Bucket.open(wanted.url, writer="trainer")
    bucket.probe()
    put_config(bucket, dump(config))
    return pool([buckets.BucketSampler(bucket, i, wanted.timeout) for i in range(wanted.count)])


class AuditSettings(Strict):
    """The keys of `earnest audit sampler URL`."""

    temperature: float = Field(0.7, gt=0, le=2, description="the run's sampling temperature")


def audited(
    url: str, overrides: Sequence[str], model: str, folder: Path | None, key: str, say: Callable[[str], None]
) -> Verdict:
    """`earnest audit sampler URL`: check that the server runs ``model`` and can sample for a run."""
    from earnest.sync.contract import audit_sampler
    from earnest.sync.server import Server

    settings = check_mapping(AuditSettings, {}, overrides)
    place = None if folder is None else str(folder)
    server = Server(url, folder=place, key=key, secret=os.environ.get(key, "").strip())
    policy = load(model, say=say)
    engine = LocalEngine(policy, attach(policy, LoRA(rank=8)))
    return audit_sampler(server, engine, temperature=settings.temperature, progress=say)


def put_config(bucket: Bucket, text: str) -> None:
    """Write the run's settings for its samplers. Raises if the prefix has another run's settings, since its samplers
    load the model of that run."""
    if bucket.create(buckets.CONFIG, "config", text.encode()):
        return
    found = bucket.get(buckets.CONFIG)
    if found is None or found.payload != text.encode():
        raise SamplingError(f"sampler.url: {bucket.url} has the settings of another run; use another prefix.")


def follow(url: str, number: int, console: Console) -> None:
    """`earnest sampler URL`: sample for the run whose trainer uses this bucket, until it ends."""
    bucket = Bucket.open(url, writer=f"sampler-{number}")
    found = bucket.get(buckets.CONFIG)
    if found is None:
        raise SamplingError(f"there is no run at {url} (no {buckets.CONFIG}); start it with sampler={url} first.")
    engine = sampling_engine(found.payload.decode())
    console.print(f"sampler {number} of {url}: {engine.policy.describe()}", markup=False, highlight=False)
    buckets.serve(bucket, number, engine)

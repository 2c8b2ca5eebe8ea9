"""The processes that train together, and what they exchange.

Every process (rank) runs the same program on the same batch. The rows are dealt to the ranks by tokens; each rank
computes the scalars and the backward pass of its own rows. A sum over the ranks then gives every rank the gradient of
the whole batch, so clipping, optimizer, guard and averages are the same everywhere, bit for bit:

    gradient = Σ_ranks Σ_own rows weight · ∂scalar/∂θ          weight = ∂loss/∂scalar, from the whole batch

The adapter's parameters are whole on every rank; the base is sharded (``engines.sharding``), and so are modules that
are trained whole. With tensor parallelism (``engines.tensor``) the ranks of a team compute the same rows, each with its
part of every layer, so the rows are dealt to teams. One process is a mesh of 1.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from earnest.errors import ConfigError, EarnestError
from earnest.seeds import derive
from earnest.signals.batch import Batch

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""The longest that a rank waits for another one that is alive: an evaluation, a slow grader."""


class Mesh:
    """This process among ``size`` processes, of which it is number ``rank``. ``tensor`` neighbours are a team, and
    ``shard`` teams hold one base."""

    def __init__(self, rank: int = 0, size: int = 1, shard: int = 1, tensor: int = 1) -> None:
        self.rank, self.size, self.shard, self.tensor = rank, size, shard, tensor
        self.team, self.teams = rank // tensor, size // tensor
        self.notes: Path | None = None  # where ranks that fail leave the reason
        self.scratch: Path | None = None  # the folder of a rank other than 0
        self.kind = "cpu"  # of the devices with the weights
        self._people: Sequence[tuple[str, int]] = ()

    @classmethod
    def start(cls, shard: int = 1, replicate: int = 1, tensor: int = 1, patience: timedelta | None = None) -> Mesh:
        """Join the processes that ``torchrun`` started: ``shard`` × ``replicate`` × ``tensor`` of them."""
        wanted, found = shard * replicate * tensor, int(os.environ.get("WORLD_SIZE", "1"))
        if wanted != found:
            sizes = f"shard={shard} × replicate={replicate}" + (f" × tensor={tensor}" if tensor > 1 else "")
            raise ConfigError(
                f"engine: {sizes} needs {wanted} processes, and this is one of {found}; start it with: "
                f"torchrun --nproc-per-node {wanted} -m earnest run …"
            )
        if found == 1:
            return cls()
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            kind = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(kind, timeout=patience or PATIENCE)
            atexit.register(end)
        mesh = cls(dist.get_rank(), found, shard, tensor)
        mesh._people = mesh.gathered((socket.gethostname(), os.getpid()))
        return mesh

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]  # every place is filled

    def of_teams(self, value: T) -> list[T]:
        """Every team's value, in the order of the teams; the ranks of a team have equal ones."""
        return self.gathered(value)[:: self.tensor]

    def from_first(self, value: T) -> T:
        """The value of rank 0."""
        return self.gathered(value)[0]

    def any(self, value: T | None) -> T | None:
        """The first rank's value that is not None."""
        return next((v for v in self.gathered(value) if v is not None), None)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Each gradient becomes its sum over the ranks; one that no rank has stays None."""
        if self.size == 1 or not parameters:
            return
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters] + [has])
        dist.all_reduce(flat)
        *sums, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for p, total, count in zip(parameters, sums, counts.tolist(), strict=True):
            p.grad = total.view_as(p).clone() if count else None

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_shards(self, values: Tensor) -> Tensor:
        """The sum over the ranks that hold one base, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.devices["shard"].get_group())
        return values

    @cached_property
    def devices(self) -> DeviceMesh:
        """The ranks in a grid: copies of the base × shards of one × parts of each layer."""
        shape = (self.teams // self.shard, self.shard, self.tensor)
        return init_device_mesh(self.kind, shape, mesh_dim_names=("replicate", "shard", "tensor"))

    def require_same(self, what: str, tensors: Sequence[Tensor], every: int = 1) -> None:
        """Raise if these tensors differ in any bit between the ranks, or between a rank and every ``every``-th next."""
        if self.size == 1:
            return
        own = [_checksum(t) for t in tensors]
        if any(other != own for other in self.gathered(own)[self.rank % every :: every]):
            raise EarnestError(
                f"the {what} differ between the {self.size} ranks, so they no longer train the same policy; a grader, "
                "a data file or a device that gives each rank another result is the usual cause."
            )

    def deal(self, units: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
        """This team's rows."""
        return deal(units, sizes, self.teams)[self.team]

    def units(self, batch: Batch, trees: Sequence[tuple[Sequence[int], int]]) -> tuple[list[Sequence[int]], list[int]]:
        """The rows that stay together, and their tokens: given trees, or single rows where there are too few trees."""
        if len(trees) >= 2 * self.teams:
            return [rows for rows, _ in trees], [size for _, size in trees]
        active = [r for r, size in enumerate(batch.sizes) if size]
        return [[r] for r in active], [batch.lengths[r] for r in active]

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Inside the block each team draws its own random numbers (dropout); all generators go on alike afterwards."""
        if self.size == 1:
            yield
            return
        seed = int(torch.randint(2**62, ()))
        seed = self.from_first(seed) if self.tensor > 1 else seed  # the ranks of a team draw the same numbers
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derive(seed, "rank", self.team))
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """If an exchange fails inside the block because a rank is gone, the error is one sentence about that rank."""
        try:
            yield
        except BaseException as error:
            atexit.unregister(end)  # it would wait for ranks that are gone
            if isinstance(error, RuntimeError) and self.size > 1 and (gone := self._gone(error)):
                raise EarnestError(gone) from error
            if self.notes is not None:
                note = self.notes / f"rank-{self.rank}.failed"
                note.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            raise

    def _gone(self, error: RuntimeError) -> str | None:
        """Which rank ended and why, if one did."""
        words = ("connection", "peer", "timed out", "timeout", "socket", "nccl", "gloo")
        if not any(word in str(error).lower() for word in words):
            return None
        for rank, (host, pid) in enumerate(self._people):
            if rank == self.rank:
                continue
            note = None if self.notes is None else self.notes / f"rank-{rank}.failed"
            if note is not None and note.exists():
                return f"rank {rank} stopped: {note.read_text(encoding='utf-8').splitlines()[0]}"
            if host == socket.gethostname() and not _alive(pid):
                return f"rank {rank} (process {pid}) was killed"
        return f"a rank no longer answers ({str(error).splitlines()[0]})"


def end() -> None:
    """Leave the process group when the program ends, and wait until its threads are idle. A thread that still drops a
    tensor while the interpreter ends would abort the process (exit code -6) after a run that succeeded."""
    if dist.is_initialized():
        dist.destroy_process_group()
    idle, latest, before = 0, time.monotonic() + 10, _ran()
    while idle < 3 and time.monotonic() < latest:
        time.sleep(0.01)  # without the interpreter's lock, which the thread needs
        now = _ran()
        idle, before = idle + 1 if now == before and None not in now else 0, now


def _ran() -> list[str | None]:
    """How long each thread of the process group ran; None for one that runs or waits for a processor now."""
    found: list[str | None] = []
    for task in sorted(Path("/proc/self/task").glob("*")):
        name, state = _stat(task / "stat")
        if name.startswith("pt_"):
            with suppress(OSError):  # it has ended
                found.append(None if state == "R" else (task / "schedstat").read_text())
    return found


def deal(units: Sequence[Sequence[int]], sizes: Sequence[int], count: int) -> list[list[int]]:
    """The rows of each of ``count`` receivers: the units of rows, largest first, each to the one with the fewest
    tokens."""
    loads, found = [0] * count, [list[int]() for _ in range(count)]
    for i in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        loads[least] += sizes[i]
        found[least] += units[i]
    return [sorted(rows) for rows in found]


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """The sum of the bytes, and the sum with weights that depend on their places."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
    weights = torch.arange(len(bits), device=bits.device) % 8191
    return int(bits.sum()), int((bits * weights).sum())


def _alive(pid: int) -> bool:
    return _stat(Path(f"/proc/{pid}/stat"))[1] not in ("", "Z", "X")


def _stat(file: Path) -> tuple[str, str]:
    """The name of a process or a thread, and the letter for what it does (R: it runs). Empty if it is gone."""
    try:
        before, after = file.read_text().rsplit(")", 1)
    except (OSError, ValueError):
        return "", ""
    return before.split("(", 1)[1], after.split()[0]

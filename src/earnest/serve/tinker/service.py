"""The Tinker API as plain calls: sessions, models, samplers, checkpoints, promises."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earnest.errors import nearest
from earnest.models.catalog import served_name
from earnest.serve.store import ServerStore
from earnest.serve.tinker import names
from earnest.serve.tinker.checkpoints import CheckpointStore
from earnest.serve.tinker.data import JsonResult, PassRequest, Result
from earnest.serve.tinker.errors import NotThere, WireError
from earnest.serve.tinker.futures import Promise, Promises, RequestQueues
from earnest.serve.tinker.models import AdamParams, LiveModel, LoraConfig
from earnest.serve.tinker.samplers import Samplers, Snapshot, WeightSource
from earnest.serve.tinker.sampling import SampleQueue, SampleRequest

if TYPE_CHECKING:
    from earnest.serve.host import Host

MODELS = 64
SESSION_TIMEOUT = 600.0
"""Seconds without a heartbeat after which a session ends; the SDK sends one every 10."""
Body = Mapping[str, Any]


@dataclass(eq=False)
class Session:
    id: str
    metadata: dict[str, Any]
    name: str | None
    last_heartbeat: float = field(default_factory=time.time)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    finished: bool = False


class Service:
    def __init__(self, host: Host, store: ServerStore) -> None:
        self.host, self.settings = host, host.settings
        self.name = served_name(self.settings.model)
        self.checkpoints: CheckpointStore = CheckpointStore(store)
        self.promises, self.queues = Promises(), RequestQueues()
        self.samplers = Samplers()
        self.sample_queue = SampleQueue(host)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, LiveModel] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self.queues.close()
        self.sample_queue.close()

    def create_session(self, body: Body) -> dict[str, Any]:
        session = Session(names.new_id(), dict(body.get("user_metadata") or {}), body.get("display_name"))
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def session(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise NotThere(f"there is no session {id!r}; the server was restarted, or it was never made here.")
        return session

    def heartbeat(self, id: str) -> dict[str, Any]:
        if id not in self.sessions or self.sessions[id].finished:
            raise WireError(f"the session {id!r} has ended.", 410)
        self.sessions[id].last_heartbeat = time.time()
        return {"type": "session_heartbeat"}

    def describe_session(self, id: str) -> dict[str, Any]:
        found = self.session(id)
        return {
            "training_run_ids": found.models,
            "sampler_ids": found.samplers,
            "user_metadata": {str(k): str(v) for k, v in found.metadata.items()} or None,
            "display_name": found.name,
        }

    def finish_session(self, id: str) -> dict[str, Any]:
        """Detach the session's models; checkpoints with a name stay."""
        session = self.session(id)
        session.finished = True
        for run in session.models:
            promise, new = self.promises.make(f"{run}:close")
            if new:
                self.queues.put(run, None, promise, functools.partial(self._unload, run))
        return {}

    def _end_lost_sessions(self) -> None:
        """End the sessions without a heartbeat: their clients are gone, and their models take memory."""
        for session in list(self.sessions.values()):
            if not session.finished and time.time() - session.last_heartbeat > SESSION_TIMEOUT:
                session.finished = True
                for run in session.models:
                    self._unload(run)

    def _open_session(self, id: str) -> Session:
        session = self.session(id)
        if session.finished:
            raise WireError(f"the session {id!r} has ended; start another.", 410)
        return session

    def check_base(self, name: str) -> None:
        if name not in (self.name, self.settings.model):
            raise WireError(f"base_model is {name!r}; this server has {self.name!r} ({nearest(name, [self.name])}).")

    def create_model(self, body: Body) -> Promise:
        session = self._open_session(str(body["session_id"]))
        self.check_base(str(body["base_model"]))
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise WireError(f"the optimizer {kind!r} is not served; use AdamW.")
        given = body.get("lora_config")
        if given is None:
            raise WireError("create_model needs a lora_config: models are trained as LoRAs.")
        seed = given.get("seed")
        flags = {k: bool(given.get(k, True)) for k in ("train_attn", "train_mlp", "train_unembed")}
        lora = LoraConfig(int(given["rank"]), secrets.randbits(31) if seed is None else int(seed), **flags)
        run = f"{session.id}:train:{int(body['model_seq_id'])}"
        metadata = {str(k): str(v) for k, v in (body.get("user_metadata") or {}).items()}

        def make() -> Result:
            self.host.wait(self.settings.load_wait)
            self._end_lost_sessions()
            if len(self.models) >= MODELS:
                raise WireError(f"{MODELS} models are being trained already; close a session first.")
            self.models[run] = LiveModel(self.host, run, lora)
            self.checkpoints.add(run, self.name, asdict(lora), metadata)
            session.models.append(run)
            return JsonResult({"type": "create_model", "model_id": run})

        return self._start(run, None, make, "create")

    def model(self, run: str) -> LiveModel:
        model = self.models.get(run)
        if model is None:
            raise NotThere(
                f"the model {run!r} is not in memory (the server was restarted, or its session ended); create a "
                "training client from its last state."
            )
        return model

    def _unload(self, run: str) -> Result:
        model = self.models.pop(run, None)
        if model is not None:
            model.close()
        self.samplers.end(run.partition(":")[0])  # in the thread that adds them, so none is added later
        return JsonResult({"type": "unload_model", "model_id": run})

    def info(self, run: str) -> dict[str, Any]:
        # Where transformers finds the tokenizer: for an embedded model, its folder on this machine.
        arch, tokenizer = self.host.policy.model.config.model_type, self.tokenizer_id()
        data = {"arch": arch, "model_name": self.name, "tokenizer_id": tokenizer}
        found = {"type": "get_info", "model_id": run, "model_name": self.name, "model_data": data}
        return found | {"is_lora": True, "lora_rank": self.model(run).lora.rank}

    def tokenizer_id(self) -> str:
        return str(getattr(self.host.policy.tokenizer, "name_or_path", "")) or self.settings.model

    def pass_(self, request: PassRequest) -> Promise:
        self.model(request.model_id)
        return self._start(request.model_id, request.seq_id, lambda: self.model(request.model_id).pass_(request))

    def optim_step(self, body: Body) -> Promise:
        self.model(str(body["model_id"]))
        if "adam_params" not in body:
            raise WireError("optim_step needs adam_params; other optimizers are not served.")
        return self._work(body, lambda model: {"metrics": model.optim_step(AdamParams.read(body["adam_params"]))})

    def save_weights(self, body: Body) -> Promise:
        def save(model: LiveModel) -> Body:
            overwrite = bool(body.get("overwrite"))
            return {"type": "save_weights", "path": self._save(body, "weights", "state", model.save, overwrite)}

        return self._work(body, save)

    def save_for_sampler(self, body: Body) -> Promise:
        def save(model: LiveModel) -> Body:
            number = body.get("sampling_session_seq_id")
            if number is not None:
                sampler = f"{model.run.partition(':')[0]}:sample:{int(number)}"
                copy = Snapshot(model.variant, tuple(model.targets), model.adapter.state_dict())
                self._add_sampler(sampler, f"{model.run}@{model.weights_version}", copy, None)
                return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}
            path = self._save(body, "sampler_weights", "v", lambda folder: model.save_sampler(folder, self.name))
            return {"type": "save_weights_for_sampler", "path": path}

        return self._work(body, save)

    def _save(
        self, body: Body, kind: names.Kind, prefix: str, write: Callable[[Path], object], overwrite: bool = False
    ) -> str:
        """Write a checkpoint under the name that the request gives, or a new one; returns its path."""
        name = names.check_name(body.get("path") or f"{prefix}-{names.new_id()[:12]}")
        path = names.CheckpointPath(str(body["model_id"]), kind, name)
        ttl, metadata = body.get("ttl_seconds"), body.get("user_metadata")
        self.checkpoints.save(path, write, overwrite=overwrite, ttl=ttl, metadata=metadata)
        return str(path)

    def load_weights(self, body: Body) -> Promise:
        if body.get("model_id") is None:
            raise WireError("load_weights needs model_id; create the model first.")
        run, path = str(body["model_id"]), names.CheckpointPath.parse(str(body["path"]))
        self.model(run)
        if path.kind != "weights":
            raise WireError(f"{path} holds weights for sampling; load a state (…/weights/…).")

        def load(model: LiveModel) -> Body:
            folder = self.checkpoints.find(path).folder
            theirs, ours = self.checkpoints.get(path.run).lora, asdict(model.lora)
            if {k: v for k, v in theirs.items() if k != "seed"} != {k: v for k, v in ours.items() if k != "seed"}:
                raise WireError(f"{path} was made with the LoRA {theirs}, this model has {ours}; create one like it.")
            model.load(folder, optimizer=bool(body.get("optimizer")))
            return {"type": "load_weights", "path": str(path), "model_id": run}

        return self._work(body, load)

    def weights_info(self, text: str) -> dict[str, Any]:
        path = names.CheckpointPath.parse(text)
        self.checkpoints.find(path)
        run = self.checkpoints.get(path.run)
        flags = {k: v for k, v in run.lora.items() if k.startswith("train_")}
        return {"base_model": run.base_model, "is_lora": True, "lora_rank": run.lora["rank"], **flags}

    def create_sampler(self, body: Body) -> dict[str, Any]:
        session = self._open_session(str(body["session_id"]))
        sampler = f"{session.id}:sample:{int(body['sampling_session_seq_id'])}"
        if body.get("model_path"):
            path = names.CheckpointPath.parse(str(body["model_path"]))
            if path.kind != "sampler_weights":
                raise WireError(
                    f"{path} is a training state; sample from …/sampler_weights/… (save_weights_for_sampler)."
                )
            found = self.checkpoints.find(path)
            self._add_sampler(sampler, f"{path}@{found.time}", found.folder, str(path))
        else:
            self.check_base(str(body.get("base_model") or ""))
            self._add_sampler(sampler, "base", None, None)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _add_sampler(self, sampler: str, key: str, source: WeightSource, path: str | None) -> None:
        self.samplers.add(sampler, key, source, path)
        session = self.sessions.get(sampler.partition(":")[0])
        if session is not None:
            session.samplers.append(sampler)

    def join(self, id: str) -> dict[str, Any]:
        return {"type": "join_sampling_session", "client_counter": self.samplers.join(id)}

    def sampler(self, id: str) -> dict[str, Any]:
        _, _, path = self.samplers.get(id)
        return {"sampler_id": id, "base_model": self.name, "model_path": path}

    def sample(self, body: Body) -> Promise:
        id = body.get("sampling_session_id")
        if id is None:
            raise WireError("asample needs a sampling_session_id; create a sampling session first.")
        key, source, _ = self.samplers.get(str(id))
        request = SampleRequest.read(body)
        number = body.get("seq_id")
        name = f"{id}:{names.new_id() if number is None else int(number)}"
        promise, new = self.promises.make(name, sample_sequence_ids=[f"{name}:{i}" for i in range(request.n)])
        if new:
            self.sample_queue.put(promise, request, key, source)
        return promise

    def capabilities(self) -> dict[str, Any]:
        room = self.host.policy.positions if self.host.ready() else None
        known = {"model_name": self.name, "max_context_length": room, "trainable": True, "sampleable": True}
        return {"supported_models": [known]}

    def skip(self, run: object, seq: object) -> None:
        """A numbered request was refused before it was queued: its model continues with the next one."""
        if isinstance(run, str) and run in self.models and isinstance(seq, int):
            self.queues.skip(run, seq)

    def _work(self, body: Body, work: Callable[[LiveModel], Body]) -> Promise:
        """Queue ``work`` on the model of a request, under the request's number."""
        run = str(body["model_id"])
        self.model(run)
        return self._start(run, body.get("seq_id"), lambda: JsonResult(work(self.model(run))))

    def _start(self, run: str, seq: int | None, work: Callable[[], Result], name: str | None = None) -> Promise:
        number = (name or names.new_id()) if seq is None else int(seq)
        promise, new = self.promises.make(f"{run}:{number}", model_id=run)
        if new:
            self.checkpoints.touch(run)
            self.queues.put(run, seq, promise, work)
        return promise

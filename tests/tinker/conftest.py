from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from earnest.serve.host import Host
from earnest.serve.tinker import service as tinker_service
from tests.tinker.reference import Reference
from tests.tinker.server import serving

KEY = "tml-test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves some of its sockets to the garbage collector, which may call at any line of ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def _swept() -> Iterator[None]:
    """Garbage of the SDK is collected here, not during another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@dataclass(eq=False)
class Served:
    url: str
    host: Host
    service: tinker.ServiceClient

    def training(self, rank: int = 4, seed: int = 3, **flags: bool) -> tinker.TrainingClient:
        return self.service.create_lora_training_client("earnest/nano", rank=rank, seed=seed, **flags)

    def adapter(self, client: tinker.TrainingClient):  # type: ignore[no-untyped-def]
        """The server's own adapter of a client's model: what really holds its weights and gradients."""
        return self.host._adapters[f"tinker {client.model_id}"]

    def reference(self, client: tinker.TrainingClient) -> Reference:
        return Reference(self.host.policy, self.adapter(client))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    tinker_service.MODELS = 1000  # all tests of a process share one server, and few of them close their session
    data: Path = tmp_path_factory.mktemp("served")
    with serving(data) as (url, host):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        yield Served(url, host, service)
        service.close("success").result()


@pytest.fixture(scope="session")
def rows(served: Served) -> list[list[int]]:
    """Some texts of different lengths, as token ids."""
    encode = served.host.policy.encode
    return [encode(t) for t in ("Sort: c a b", "hello", "What is 4 + 5? It is nine, I think.", "a b c d e f g")]


def datum(ids: list[int], **inputs: object) -> types.Datum:
    """Next-token prediction on a row, with these inputs beside the targets."""
    given: dict[str, object] = {"target_tokens": torch.tensor(ids[1:]), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)  # type: ignore[arg-type]

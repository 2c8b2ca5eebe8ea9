"""Bytes: what the SDK writes is what we read, and what we write is what it reads."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput, TensorData

from earnest.serve.tinker import wire
from earnest.serve.tinker.data import Cells, Failed, JsonResult, PassOutput, SampleOutput, Sequence, Top
from earnest.serve.tinker.errors import WireError

NUMBERS = st.floats(-100, 100, width=32)


@given(st.data(), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 4)), st.booleans())
def test_a_request_arrives_as_it_was_written(data: st.DataObject, n: int, k: int | None, sparse: bool) -> None:
    shape = (n,) if k is None else (n, k)
    size = int(np.prod(shape))
    tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    targets = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size))).reshape(shape)
    weights = torch.tensor(data.draw(st.lists(NUMBERS, min_size=size, max_size=size))).reshape(shape)
    pack = TensorData.from_torch_sparse if sparse and k is not None else TensorData.from_torch
    config = data.draw(st.dictionaries(st.text(max_size=5), st.floats(-9, 9), max_size=3))
    request = ForwardBackwardRequest(
        model_id="m",
        seq_id=4,
        forward_backward_input=ForwardBackwardInput(
            data=[
                Datum(
                    model_input=ModelInput.from_ints(tokens),
                    loss_fn_inputs={"target_tokens": pack(targets), "weights": pack(weights)},
                )
            ],
            loss_fn="ppo",
            loss_fn_config=config,
        ),
    )
    body = forward_backward_request_to_proto(request).SerializeToString()
    squeezed = zstandard.ZstdCompressor().compress(body)
    assert wire.decompress(squeezed, "zstd", 1 << 20) == body
    read = wire.read_pass(body, wire.PROTOBUF)[2]()
    assert (read.model_id, read.seq_id, read.loss_fn, dict(read.config)) == ("m", 4, "ppo", config)
    (datum,) = read.data
    assert datum.tokens == tuple(tokens)
    assert torch.equal(datum.inputs["target_tokens"], targets) and torch.equal(datum.inputs["weights"], weights)


def test_a_json_request_is_read_too() -> None:
    tensor = {"data": [5, 6], "dtype": "int64"}
    datum = {"model_input": {"chunks": [{"tokens": [3, 5], "type": "encoded_text"}]}, "loss_fn_inputs": {"t": tensor}}
    body = {"model_id": "m", "seq_id": 2, "forward_input": {"data": [datum], "loss_fn": "dro", "loss_fn_config": None}}
    read = wire.read_pass(json.dumps(body).encode(), "application/json")[2]()
    assert read.forward_only and read.data[0].tokens == (3, 5) and read.data[0].inputs["t"].tolist() == [5, 6]


def test_results_are_what_the_sdk_reads() -> None:
    lps = (torch.tensor([-1.0, -2.0]), torch.tensor([[-1.0, -3.0]]), torch.tensor([[-4.0, -5.0], [-6.0, -7.0]]))
    data, kind = wire.write(PassOutput(lps, {"loss:sum": 3.5}), protobuf=True)
    assert kind == wire.PROTOBUF
    read = deserialize_forward_backward_output(data)
    assert read.metrics == {"loss:sum": 3.5}
    for found, lp in zip(read.loss_fn_outputs, lps, strict=True):
        assert torch.equal(found["logprobs"].to_torch(), lp)

    top = Top(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]), (False, True))
    cells = Cells(torch.tensor([-3.0]), (1, 4), torch.tensor([0, 1]), torch.tensor([2]))
    output = SampleOutput((Sequence((7, 8), (-0.1, -0.2), "stop"),), (None, -1.5), top, cells, None)
    sample = deserialize_sample_response(wire.write(output, protobuf=True)[0])
    assert sample.sequences[0].tokens == [7, 8] and sample.sequences[0].stop_reason == "stop"
    assert sample.prompt_logprobs == [None, -1.5]
    assert sample.topk_prompt_logprobs == [None, [(3, -0.25), (4, -2.0)]]
    assert sample.target_prompt_logprobs is not None
    assert sample.target_prompt_logprobs.to_torch().tolist() == [[0.0, 0.0, -3.0, 0.0]]
    assert json.loads(wire.write(Failed("no", "user"), protobuf=True)[0]) == {"error": "no", "category": "user"}
    assert json.loads(wire.write(JsonResult({"a": 1}), protobuf=False)[0]) == {"a": 1}


def test_bytes_that_are_something_else_are_refused() -> None:
    with pytest.raises(WireError, match="not zstd"):
        wire.decompress(b"no", "zstd", 100)
    with pytest.raises(WireError, match="more than 1000 bytes"):
        wire.decompress(zstandard.ZstdCompressor().compress(b"0" * 10**6), "zstd", 1000)
    with pytest.raises(WireError, match="zstd or plain"):
        wire.decompress(b"", "gzip", 100)
    for body, kind in ((b"\xff\xff", wire.PROTOBUF), (b"[]", "application/json"), (b"{", "application/json")):
        with pytest.raises(WireError, match="is not"):
            wire.read_pass(body, kind)[2]()
    bad = Cells(torch.tensor([1.0]), (2, 2), torch.tensor([0, 1, 1]), torch.tensor([2]))
    falling = Cells(torch.tensor([1.0]), (2, 2), torch.tensor([0, 2, 1]), torch.tensor([0]))
    for cells in (bad, falling):
        with pytest.raises(WireError, match="do not describe"):
            wire.dense(cells, "x")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for kind in (wire.PROTOBUF, "application/json"):
        with contextlib.suppress(WireError):
            wire.read_pass(body, kind)[2]()

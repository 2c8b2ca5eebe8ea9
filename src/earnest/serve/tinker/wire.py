"""Decoding of requests and encoding of results: the SDK's protobuf (by its own generated module), and JSON.

Numbers are little-endian, tokens int32, indices int64. A body may be compressed with zstd.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from earnest.errors import MissingExtra
from earnest.serve.tinker.data import (
    Cells,
    Datum,
    Failed,
    JsonResult,
    PassOutput,
    PassRequest,
    Result,
    SampleOutput,
    Top,
)
from earnest.serve.tinker.errors import WireError

PROTOBUF = "application/x-protobuf"
EMPTY_LOGPROB = -99999.0
OUTPUT_TYPE = "earnest:TokenLogprobs"


def messages() -> Any:
    """The SDK's generated protobuf module."""
    try:
        return importlib.import_module("tinker.proto.tinker_public_pb2")
    except ImportError as error:
        raise MissingExtra("tinker", "tinker", "Serving the Tinker API") from error


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The decompressed body; one of more than ``limit`` bytes is refused."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise WireError(f"the body is encoded as {encoding!r}; send zstd or plain bytes.", 415)
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("zstandard", "tinker", "Reading compressed requests") from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise WireError(f"the body is not zstd ({error}).") from error
    if len(plain) > limit:
        raise WireError(f"the body is more than {limit} bytes; send it in smaller parts.", 413)
    return plain


def read_pass(body: bytes, content_type: str) -> tuple[object, object, Callable[[], PassRequest]]:
    """(model_id, seq_id, the rest of it) of a forward or forward_backward request, so that one whose data cannot be
    read is refused under its number."""
    if content_type.split(";")[0].strip() == PROTOBUF:
        request = _parse_proto(body)
        return request.model_id, request.seq_id, lambda: _read_proto(request)
    with _as_wire_error():
        found = json.loads(body)
        return found["model_id"], found.get("seq_id"), lambda: _read_json(found)


@contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except WireError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"the body is not a forward_backward request ({type(error).__name__}: {error}).") from error


def _read_json(found: Mapping[str, Any]) -> PassRequest:
    with _as_wire_error():
        given = found.get("forward_backward_input") or found["forward_input"]
        return PassRequest(
            model_id=str(found["model_id"]),
            seq_id=found.get("seq_id"),
            data=tuple(_json_datum(d, i) for i, d in enumerate(given["data"])),
            loss_fn=str(given["loss_fn"]),
            config=dict(given.get("loss_fn_config") or {}),
            forward_only="forward_input" in found,
        )


def _parse_proto(body: bytes) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    request = messages().ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"the body is not a ForwardBackwardRequest ({error}).") from error
    return request


def _read_proto(request: Any) -> PassRequest:
    config: dict[str, float | str] = {
        k: v.text if v.WhichOneof("value") == "text" else v.number for k, v in request.loss_fn_config_v2.items()
    } or dict(request.loss_fn_config)
    return PassRequest(
        model_id=request.model_id,
        seq_id=request.seq_id or None,
        data=tuple(_proto_datum(d, i) for i, d in enumerate(request.data)),
        loss_fn=request.loss_fn,
        config=config,
        forward_only=request.forward_only,
    )


def _proto_datum(datum: Any, index: int) -> Datum:
    if datum.model_input_spans or datum.loss_fn_input_spans:
        raise WireError(f"datum {index} has provenance spans; only stable_reinforce reads them, which is not served.")
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise WireError(f"datum {index} has a chunk that is not text; this server reads tokens only.")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise WireError(f"datum {index}: {len(data)} bytes are not a whole number of 4-byte values.")
        tokens += np.frombuffer(data, dtype="<i4").tolist()
    inputs = {name: _proto_tensor(t, f"datum {index}: {name}") for name, t in datum.loss_fn_inputs.items()}
    return Datum(tuple(tokens), inputs)


def _proto_tensor(message: Any, where: str) -> Tensor:
    pb = messages()
    kinds = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
    if message.dtype not in kinds:
        raise WireError(f"{where}: unknown dtype {message.dtype}; send float32 or int64.")
    kind, shape = kinds[message.dtype], tuple(message.shape)
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            csr = message.sparse_csr
            sent = ((csr.values, kind), (csr.crow_indices, "<i8"), (csr.col_indices, "<i8"))
            values, rows, columns = (torch.from_numpy(np.frombuffer(data, k).copy()) for data, k in sent)
            return dense(Cells(values, shape, rows, columns), where)
        flat = np.frombuffer(message.dense, kind)
    except ValueError as error:
        raise WireError(f"{where}: {error}.") from error
    return _shaped(torch.from_numpy(flat.copy()), shape or (len(flat),), where)


def _json_datum(datum: Mapping[str, Any], index: int) -> Datum:
    where, inputs = f"datum {index}", {}
    for name, given in datum["loss_fn_inputs"].items():
        cells, place = json_cells(given, f"{where}: {name}"), f"{where}: {name}"
        inputs[name] = _shaped(cells.values, cells.shape, place) if cells.rows is None else dense(cells, place)
    return Datum(tuple(json_tokens(datum["model_input"], where)), inputs)


def json_tokens(model_input: Mapping[str, Any], where: str) -> list[int]:
    tokens: list[int] = []
    for chunk in model_input["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise WireError(f"{where} has a chunk of type {chunk['type']!r}; this server reads tokens only.")
        tokens += [int(t) for t in chunk["tokens"]]
    return tokens


def json_cells(given: Mapping[str, Any], where: str) -> Cells:
    if given["dtype"] not in ("float32", "int64"):
        raise WireError(f"{where}: unknown dtype {given['dtype']!r}; send float32 or int64.")
    kind = torch.float32 if given["dtype"] == "float32" else torch.int64
    values = torch.tensor(given["data"], dtype=kind)
    shape = tuple(given["shape"]) if given.get("shape") is not None else (values.numel(),)
    if given.get("sparse_crow_indices") is None:
        return Cells(values, shape)
    rows, columns = (torch.tensor(given[f"sparse_{side}_indices"], dtype=torch.int64) for side in ("crow", "col"))
    return Cells(values, shape, rows, columns)


def dense(cells: Cells, where: str, empty: int = 0) -> Tensor:
    """The dense matrix of compressed rows; cells that are not named are ``empty``."""
    rows, columns, shape = cells.rows, cells.columns, cells.shape
    assert rows is not None and columns is not None
    good = (
        len(shape) == 2
        and rows.shape[0] == shape[0] + 1
        and bool((rows[1:] >= rows[:-1]).all())
        and int(rows[0]) == 0
        and int(rows[-1]) == cells.values.numel() == columns.numel()
        and (not columns.numel() or bool((columns >= 0).all() and (columns < shape[1]).all()))
    )
    if not good:
        raise WireError(f"{where}: its compressed rows do not describe a matrix of shape {shape}.")
    full = torch.full(shape, empty, dtype=cells.values.dtype)
    full[row_of(cells), columns] = cells.values
    return full


def row_of(cells: Cells) -> Tensor:
    """The row index of every named cell."""
    assert cells.rows is not None
    return torch.repeat_interleave(torch.arange(cells.shape[0]), cells.rows[1:] - cells.rows[:-1])


def _shaped(flat: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    if any(s < 0 for s in shape) or int(np.prod(shape)) != flat.numel():
        raise WireError(f"{where}: {flat.numel()} values do not fill the shape {shape}.")
    return flat.reshape(shape)


def write(result: Result, *, protobuf: bool) -> tuple[bytes, str]:
    """A result's bytes and content type; ``protobuf`` where the client accepts it."""
    match result:
        case PassOutput() if protobuf:
            return _proto_pass(result), PROTOBUF
        case SampleOutput() if protobuf:
            return _proto_sample(result), PROTOBUF
        case PassOutput():
            body: Mapping[str, object] = {
                "loss_fn_output_type": OUTPUT_TYPE.rpartition(":")[2],
                "loss_fn_outputs": [{"logprobs": _json_of(lp)} for lp in result.logprobs],
                "metrics": dict(result.metrics),
            }
        case SampleOutput():
            body = _json_sample(result)
        case JsonResult():
            body = result.body
        case Failed():
            body = {"error": result.error, "category": result.category}
    return json.dumps(body).encode(), "application/json"


def _json_of(values: Tensor) -> dict[str, object]:
    kind = "float32" if values.is_floating_point() else "int64"
    return {"data": values.flatten().tolist(), "dtype": kind, "shape": list(values.shape)}


def _bytes(values: Tensor | Iterable[float], kind: str) -> bytes:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(list(values))
    return np.ascontiguousarray(array.astype(kind)).tobytes()


def _proto_pass(output: PassOutput) -> bytes:
    pb = messages()
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in output.metrics.items():
        message.metrics[name] = value
    # A record has one trailing shape: a datum with another number of targets per position starts a new record.
    runs: list[list[Tensor]] = []
    for lp in output.logprobs:
        if runs and runs[-1][0].shape[1:] == lp.shape[1:]:
            runs[-1].append(lp)
        else:
            runs.append([lp])
    for run in runs:
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(run))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(run[0].shape[1:])
        field.data = b"".join(_bytes(lp, "<f4") for lp in run)
        field.offsets = _bytes(np.cumsum([0, *(4 * lp.numel() for lp in run)]).tolist(), "<i8")
    return cast(bytes, message.SerializeToString())


def _proto_top(message: Any, top: Top) -> None:
    scored = torch.tensor(top.scored)[:, None]
    message.length, message.k = top.ids.shape
    message.token_ids = _bytes(torch.where(scored, top.ids, 0), "<i4")
    message.logprobs = _bytes(torch.where(scored, top.logprobs, EMPTY_LOGPROB), "<f4")


def _proto_dense(message: Any, values: Tensor) -> None:
    pb = messages()
    message.dtype = pb.DTYPE_FLOAT32 if values.is_floating_point() else pb.DTYPE_INT32
    message.shape.extend(values.shape)
    message.dense = _bytes(values, "<f4" if values.is_floating_point() else "<i4")


def _proto_sample(output: SampleOutput) -> bytes:
    pb = messages()
    message = pb.SampleResponse()
    for sequence in output.sequences:
        reason = pb.STOP_REASON_STOP if sequence.finish == "stop" else pb.STOP_REASON_LENGTH
        own = message.sequences.add(
            stop_reason=reason,
            tokens=_bytes(sequence.tokens, "<i4"),
            logprobs=_bytes(sequence.logprobs, "<f4"),
        )
        if sequence.top is not None:
            _proto_top(own.topk_sampled_logprobs, sequence.top)
    if output.prompt is not None:
        message.prompt_logprobs = _bytes((float("nan") if v is None else v for v in output.prompt), "<f4")
    if output.top_prompt is not None:
        _proto_top(message.topk_prompt_logprobs, output.top_prompt)
    if (cells := output.targets) is not None:
        target = message.target_prompt_logprobs
        target.dtype = pb.DTYPE_FLOAT32
        target.shape.extend(cells.shape)
        if cells.rows is None or cells.columns is None:
            target.dense = _bytes(cells.values, "<f4")
        else:
            target.sparse_csr.values = _bytes(cells.values, "<f4")
            target.sparse_csr.crow_indices = _bytes(cells.rows, "<i8")
            target.sparse_csr.col_indices = _bytes(cells.columns, "<i8")
    if output.alternatives is not None:
        _proto_dense(message.prompt_alt_tokens.tokens, output.alternatives[0])
        _proto_dense(message.prompt_alt_tokens.logprobs, output.alternatives[1])
    return cast(bytes, message.SerializeToString())


def _json_sample(output: SampleOutput) -> Mapping[str, object]:
    if output.targets is not None or output.alternatives is not None:
        raise WireError("target_prompt_logprobs and prompt_alt_tokens are answered as protobuf; accept it.", 406)
    top = output.top_prompt
    return {
        "type": "sample",
        "sequences": [
            {"stop_reason": s.finish, "tokens": list(s.tokens), "logprobs": list(s.logprobs)} for s in output.sequences
        ],
        "prompt_logprobs": None if output.prompt is None else list(output.prompt),
        "topk_prompt_logprobs": None
        if top is None
        else [
            list(zip(i, lp, strict=True)) if scored else None
            for i, lp, scored in zip(top.ids.tolist(), top.logprobs.tolist(), top.scored, strict=True)
        ],
    }

"""Train nano from scratch: text, tokenizer, weights. Bit-equal on one machine with a fixed number of threads.

    python -m scripts.nano.train                                  # the shipped model, about half an hour on one core
    python -m scripts.nano.train --tokens 200000 --out /tmp/tiny   # a look

AdamW with warm-up and cosine decay; a batch holds whole documents of similar length, padded on the right, so that
positions start at 0 as in sampling. Tokens that the model must produce have weight 1 in the loss, tokens of the prompt
a small weight.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import corpus, render

VERSION = "nano-1"
CONTEXT = 512
FOLDER = Path(__file__).parents[2] / "src" / "earnest" / "models" / "nano"
TOKENIZER_DOCUMENTS = 20_000
PROMPT_WEIGHT = 0.03


@dataclass(frozen=True)
class Settings:
    tokens: int = 10_000_000
    seed: int = 1
    batch_tokens: int = 1_536
    lr: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: float = 0.03
    width: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 384
    threads: int = 1


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    weight: list[float]


def encode(tokenizer: Tokenizer, documents: list[corpus.Document]) -> list[Encoded]:
    """Token ids with their loss weights. Pieces meet at marks and newlines, so encoding them apart changes nothing."""
    parts = [document.pieces() for document in documents]
    flat = tokenizer.encode_batch_fast([text for doc in parts for text, _ in doc], add_special_tokens=False)
    found = iter(flat)
    out: list[Encoded] = []
    for doc in parts:
        ids: list[int] = []
        weight: list[float] = []
        for _, supervised in doc:
            piece = next(found).ids
            ids += piece
            weight += [1.0 if supervised else PROMPT_WEIGHT] * len(piece)
        out.append(Encoded(ids[:CONTEXT], weight[:CONTEXT]))
    return out


def make_tokenizer(seed: int) -> Tokenizer:
    documents = itertools.islice(corpus.documents(seed, corpus.STAGES[-1]), TOKENIZER_DOCUMENTS)
    texts = ("".join(text for text, _ in d.pieces()) for d in documents)
    return render.train_tokenizer(texts)


def make_documents(tokenizer: Tokenizer, settings: Settings, stage: corpus.Stage) -> tuple[list[Encoded], Counter[str]]:
    """Documents until the budget of tokens is full, and the tokens of each kind."""
    stream, out, kinds = corpus.documents(settings.seed, stage), [], Counter[str]()
    while kinds.total() < stage.share * settings.tokens:
        chunk = list(itertools.islice(stream, 500))
        for document, encoded in zip(chunk, encode(tokenizer, chunk), strict=True):
            out.append(encoded)
            kinds[document.kind] += len(encoded.ids)
    return out, kinds


def batches(documents: list[Encoded], settings: Settings) -> list[list[Encoded]]:
    """Batches of about ``batch_tokens`` tokens: sorted by length within a window, and shuffled within it."""
    generator = torch.Generator().manual_seed(settings.seed)
    out: list[list[Encoded]] = []
    for start in range(0, len(documents), 8_192):
        window = sorted(documents[start : start + 8_192], key=lambda d: len(d.ids))
        made: list[list[Encoded]] = [[]]
        for document in window:
            if made[-1] and len(document.ids) * (len(made[-1]) + 1) > settings.batch_tokens:
                made.append([])
            made[-1].append(document)
        out += [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
    return out


def collate(batch: list[Encoded], pad: int) -> tuple[Tensor, Tensor]:
    length = max(len(d.ids) for d in batch)
    ids = torch.full((len(batch), length), pad)
    weight = torch.zeros(len(batch), length)
    for row, document in enumerate(batch):
        ids[row, : len(document.ids)] = torch.tensor(document.ids)
        weight[row, : len(document.ids)] = torch.tensor(document.weight)
    return ids, weight


def loss_of(model: LlamaForCausalLM, ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of −log p. Padding stands right of the text, where a causal model does not see it, and weighs 0."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weight[:, 1:].flatten()
    return (nll * w).sum() / w.sum()


def schedule(step: int, steps: int, settings: Settings) -> float:
    warm = max(1, round(settings.warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def make_model(tokenizer: Tokenizer, settings: Settings) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.width,
        intermediate_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1/√width: the default 0.02 learns to copy several times later
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(render.END),
        pad_token_id=tokenizer.token_to_id(render.PAD),
        earnest_version=VERSION,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, plan: list[list[Encoded]], settings: Settings, console: Console) -> Iterator[float]:
    """One pass over the plan; yields the loss of every step."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    recent = 0.0
    model.train()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training nano", total=len(plan))
        for step, batch in enumerate(plan):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * schedule(step, len(plan), settings)
            loss = loss_of(model, *collate(batch, model.config.pad_token_id))
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss {loss.item()} at step {step}: lower --lr (now {settings.lr})")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent = 0.99 * recent + 0.01 * loss.item() if step else loss.item()
            progress.update(bar, advance=1, description=f"loss {recent:.3f}")
            if (step + 1) % 200 == 0:
                console.print(f"step {step + 1} of {len(plan)}: loss {recent:.3f}")
            yield recent


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A folder that ``from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=render.END,
        pad_token=render.PAD,
        additional_special_tokens=[render.START],
        chat_template=render.TEMPLATE.read_text(),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.save_pretrained(folder)
    model.eval()
    model.generation_config.eos_token_id = fast.eos_token_id
    model.generation_config.pad_token_id = fast.pad_token_id
    model.save_pretrained(folder)
    model.train()
    (folder / "model.safetensors").chmod(0o644)
    (folder / "VERSION").write_text(VERSION + "\n")


def digest(folder: Path) -> str:
    """SHA-256 over weights and tokenizer: what two equal runs share."""
    parts = [(folder / name).read_bytes() for name in ("model.safetensors", "tokenizer.json")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    out: Path = options.pop("out")
    settings = Settings(**options)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    console = Console()
    console.print("writing the text and learning its tokens")
    tokenizer = make_tokenizer(settings.seed)
    plan: list[list[Encoded]] = []
    kinds, count = Counter[str](), 0
    ends: list[int] = []
    for stage in corpus.STAGES:
        documents, more = make_documents(tokenizer, settings, stage)
        plan += batches(documents, settings)
        ends.append(len(plan))
        kinds += more
        count += len(documents)
        share = {kind: f"{tokens / more.total():.1%}" for kind, tokens in more.most_common()}
        console.print(f"{stage.name}: {more.total()} tokens in {len(documents)} documents, {share}")
    model = make_model(tokenizer, settings)
    console.print(f"{sum(p.numel() for p in model.parameters())} parameters")
    losses: list[float] = []
    for loss in train(model, plan, settings, console):
        losses.append(loss)
        if len(losses) in ends:  # a folder to look at after each stage; the last is the model
            save(model, tokenizer, out)
    record = {
        "version": VERSION,
        "settings": vars(settings),
        "tokens": kinds.total(),
        "documents": count,
        "steps": len(plan),
        "share_of_tokens": {kind: round(tokens / kinds.total(), 4) for kind, tokens in kinds.most_common()},
        "final_loss": round(losses[-1], 4),
        "sha256": digest(out),
        "torch": torch.__version__,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"saved {out}: {record['sha256']}")


if __name__ == "__main__":
    main()

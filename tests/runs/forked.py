"""The command line in processes that are forked from one that has imported torch: they start at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import earnest.runs.loop
from earnest import cli
from earnest.disk import JsonLines

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
torch.set_num_threads(1)
LOADED = (LlamaForCausalLM, PreTrainedTokenizerFast, earnest.runs.loop)


def dying(number: signal.Signals, step: int, log: Path, *words: str) -> tuple[int | None, str]:
    """(exit code, output) of `earnest WORDS…` in a process that sends itself a signal in the middle of a step, when its
    metrics line is on disk and its samples are not."""
    process = FORKS.Process(target=_command, args=(int(number), step, str(log), words))
    process.start()
    process.join(300)
    return process.exitcode, log.read_text()


def _command(number: int, step: int, log: str, words: tuple[str, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    append = JsonLines.append

    def append_and_die(self: JsonLines, record: dict[str, Any]) -> None:
        append(self, record)
        if record.get("kind") == "step" and record["step"] == step:
            os.kill(os.getpid(), number)

    JsonLines.append = append_and_die  # type: ignore[method-assign]
    cli.main(list(words))

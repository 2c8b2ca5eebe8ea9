"""What `earnest serve` prints."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from earnest.config.explain import sentence
from earnest.errors import ConfigError
from earnest.serve.settings import ServeSettings


def serve(
    host: str,
    port: int,
    model: str,
    data: Path,
    keys: Path | None,
    learn: Path | None,
    adapters: list[str] | None,
    threads: int | None,
    new_key: str | None,
) -> None:
    """Start the server, or make a key."""
    if new_key is not None:
        from earnest.serve.keys import new_key as make

        key, entry = make(new_key)
        print(f"{key}\n\nThis key is shown once. Put these lines into the file for --keys:\n\nkeys:\n{entry}")
        return
    try:
        settings = ServeSettings(
            host=host,
            port=port,
            model=model,
            data=data,
            keys=keys,
            learn=learn,
            adapters=tuple(adapters or ("assistant",)),
            threads=threads,
        )
    except ValidationError as error:
        raise ConfigError(sentence(error, ServeSettings)) from None
    from earnest.serve.run import run

    run(settings)

"""A folder without an adapter: the message names what the folder is and what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from earnest.adapters.files import AdapterError, adapter_folder


@pytest.mark.parametrize(
    ("file", "way_out"),
    [
        ("run.json", "The run has not finished; resume it first"),
        ("seed-0/run.json", "It holds 1 runs; give one of them, such as .*seed-0"),
        ("config.json", "It is a whole model; give it as the model"),
    ],
)
def test_the_way_out_is_by_what_the_folder_holds(file: str, way_out: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(AdapterError, match=way_out):
        adapter_folder(tmp_path)

"""The generated table of laws."""

from __future__ import annotations

from earnest.audit.laws.__main__ import table


def test_the_generated_table_has_every_law() -> None:
    lines = table().splitlines()[2:]
    codes = {line.split("|")[1].split(",")[0].strip() for line in lines}
    own = [line.split("|")[1].split(",")[0].strip() for line in lines if "(" not in line.split("|")[1]]
    assert len(set(own)) == len(own), "each law of a step has its own code"
    assert {
        "GL",
        "IG",
        "KG",
        "PG-ONPOLICY",
        "PG-CLIP",
        "KL-ZERO",
        "SE",
        "MI",
        "CV",
        "DF",
        "RT",
        "MR",
        "FD",
        "DR",
        "F64",
    } <= codes
    for subject in ("AdvantageEstimator", "Accumulation", "RoundTrip", "Resume", "Merge", "WeightSync", "Schedule",
                    "OuterStep", "Unbiased", "Gather", "Census", "Update", "Ema", "MergedLayer"):  # fmt: skip
        assert sum(f"({subject})" in line.split("|")[1] for line in lines) == 1, subject

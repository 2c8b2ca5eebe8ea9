"""Escaped HTML: only ``el`` makes ``Html``, and it escapes every other text."""

from __future__ import annotations

import html
import math

VOID = frozenset({"meta", "br", "hr", "input"})


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


Child = str | Html | None


def el(tag: str, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element. ``class_`` loses its underscore, ``aria_label`` gets a hyphen; None and False are left out."""
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(name if value is True else f'{name}="{html.escape(str(value), quote=True)}"')
    opening = Html(f"<{' '.join(parts)}>")
    return opening if tag in VOID else Html(f"{opening}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    return Html("".join(c if isinstance(c, Html) else html.escape(c, quote=False) for c in children if c is not None))


def number(value: float | None, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, and an exponent only if it is very large or small."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e7:
        return _minus(f"{value:,.0f}")
    if 1e-4 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        return _minus(text.rstrip("0").rstrip(".") if "." in text else text)
    mantissa, exponent = f"{value:.{max(digits - 2, 1)}e}".split("e")
    return _minus(f"{mantissa}e{int(exponent)}")


def fixed(value: float | None, decimals: int = 3) -> str:
    """A number with a fixed number of decimals, for columns."""
    return "–" if value is None else _minus(f"{value:,.{decimals}f}")


def signed(value: float | None, decimals: int = 3) -> str:
    return "–" if value is None else _minus(f"{value:+,.{decimals}f}")


def plus_minus(value: str, se: float | None) -> str:
    """A number with its standard error, where it is known."""
    return value if se is None else f"{value} ± {fixed(se)}"


def duration(seconds: float) -> str:
    """ "80 s", "12 min 3 s", "3 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def time_left(seconds: float, done: float, total: float) -> str:
    """ ", 12 s left" after ``seconds`` for ``done`` of ``total`` equal parts; nothing where it is not known yet."""
    return f", {duration(seconds * (total - done) / done)} left" if 0 < done < total and seconds >= 1 else ""


def _minus(text: str) -> str:
    return text.replace("-", "−")

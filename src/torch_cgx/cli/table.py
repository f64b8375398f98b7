"""Aligned tables and readable units for the terminal. Plain ASCII, no colours, no measuring."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table with columns as wide as their widest cell: the first `left` flush left, the others flush right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def format_line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([format_line(header), rule, *map(format_line, rows)])


def format_markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the table in Markdown."""
    rule = ["---" if column < left else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: `18.1 us`, `3.07 ms`, `1.25 s`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if float(f"{seconds * factor:.3g}") < 1000:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_nbytes(nbytes: float) -> str:
    """Return a size such as `64 KB` or `3.2 MB`. K, M and G are powers of 1024, as in the arguments."""
    value, units = float(nbytes), ["B", "KB", "MB", "GB"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = _three_digits(value)
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {units[0]}"


def format_bits(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"

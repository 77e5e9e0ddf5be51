"""Lines over time as a small SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 26, 22
ROW = 14
"""Height of a line of the legend."""

COLORS = ("#3274d9", "#e0752d", "#3f8f3f", "#c4162a", "#8f3bb8", "#806600", "#1f9e9e", "#555555")
DASHES = ("", "5 2", "1.5 1.5")

Points = Sequence[tuple[float, float]]

UNITS = {
    "percentunit": (100, " %"),
    "s": (1000, " ms"),
    "ops": (1, "/s"),
    "bytes": (1 / (1 << 20), " MiB"),
    "short": (1, ""),
}


def draw(title: str, unit: str, lines: Sequence[tuple[str, Points]], *, stacked: bool = False) -> str:
    """A chart of lines.

    Args:
        title: above it.
        unit: as Grafana calls it: percentunit, s, ops, bytes or short.
        lines: legend and (second, value) of each.
        stacked: each on top of the ones before, filled.
    """
    factor, suffix = UNITS[unit]
    lines = [(name, [(at, value * factor) for at, value in points]) for name, points in lines]
    if stacked:
        lines = _stacked(lines)
    top = _ceiling(max((value for _, points in lines for _, value in points), default=1.0))
    end = max((at for _, points in lines for at, _ in points), default=1.0)
    columns = 3
    legend = math.ceil(len(lines) / columns) * ROW
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT + legend}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT + legend}" font-family="sans-serif" font-size="10" fill="#333">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT + legend}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="12" font-weight="bold">{escape(title)}</text>',
        *_axes(top, end, suffix),
    ]
    for index, (name, points) in reversed(list(enumerate(lines))):
        color, dash = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
        path = " ".join(f"{_x(at, end):.1f},{_y(value, top):.1f}" for at, value in points)
        if stacked and points:
            base = f"{_x(points[-1][0], end):.1f},{_y(0, top)} {_x(points[0][0], end):.1f},{_y(0, top)}"
            parts.append(f'<polygon points="{path} {base}" fill="{color}"/>')
        else:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-dasharray="{dash}"/>')
        x, y = LEFT + index % columns * 140, HEIGHT + index // columns * ROW + 6
        parts.append(f'<rect x="{x}" y="{y - 6}" width="10" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _stacked(lines: Sequence[tuple[str, Points]]) -> list[tuple[str, Points]]:
    below: dict[float, float] = {}
    result: list[tuple[str, Points]] = []
    for name, points in lines:
        below |= {at: below.get(at, 0.0) + value for at, value in points}
        result.append((name, [(at, below[at]) for at, _ in points]))
    return result


def _axes(top: float, end: float, suffix: str) -> list[str]:
    parts = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{value:,.4g}{suffix}</text>')
        at = end * step / 4
        anchor = "end" if step == 4 else "middle"
        parts.append(f'<text x="{_x(at, end):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{at:.0f} s</text>')
    return parts


def _x(at: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / end


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _ceiling(most: float) -> float:
    """The next number that divides well into quarters."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if power * step >= most * 0.999)

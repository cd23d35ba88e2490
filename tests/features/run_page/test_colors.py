"""Neighbouring lines of a chart are told apart by people who see no green."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import features.run_page

CSS = Path(features.run_page.__file__).parent / "assets" / "page.css"
# Linear RGB as deuteranopes see it (Machado, Oliveira, Fernandes 2009, severity 1).
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
WHITE = (0.95047, 1.0, 1.08883)
LEAST_DIFFERENCE = 20.0


def palettes() -> dict[str, list[str]]:
    found = re.findall(r"--line-\d+: (#[0-9a-f]{6});", CSS.read_text())
    return {"light": found[:16], "dark": found[16:]}


def linear(color: str) -> list[float]:
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    def f(t: float) -> float:
        return t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29

    x, y, z = (f(c / w) for c, w in zip(times(TO_XYZ, rgb), WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(color: str) -> tuple[float, float, float]:
    """Returns a colour in CIELAB as deuteranopes see it."""
    return lab([min(1.0, max(0.0, c)) for c in times(DEUTERANOPIA, linear(color))])


def difference(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Returns CIEDE2000."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_c**7 / (mean_c**7 + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    big_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    l_mean, c_mean = (l1 + l2) / 2, (c1 + c2) / 2
    h_mean = (h1 + h2) / 2 if abs(h1 - h2) <= 180 else ((h1 + h2) / 2 + 180) % 360
    t = 1 - 0.17 * math.cos(math.radians(h_mean - 30)) + 0.24 * math.cos(math.radians(2 * h_mean))
    t += 0.32 * math.cos(math.radians(3 * h_mean + 6))
    t -= 0.20 * math.cos(math.radians(4 * h_mean - 63))
    s_l = 1 + 0.015 * (l_mean - 50) ** 2 / math.sqrt(20 + (l_mean - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c_mean, 1 + 0.015 * c_mean * t
    rotation = -2 * math.sqrt(c_mean**7 / (c_mean**7 + 25**7))
    rotation *= math.sin(math.radians(60 * math.exp(-(((h_mean - 275) / 25) ** 2))))
    parts = (l2 - l1) / s_l, (c2 - c1) / s_c, big_h / s_h
    return math.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2])


def test_the_difference_is_that_of_the_published_pairs() -> None:
    # Sharma, Wu, Dalal 2005, pairs 1, 7, 17 and 25.
    for one, other, expected in (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ):
        assert difference(one, other) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_neighbouring_lines_differ_for_deuteranopes(mode: str) -> None:
    colors = palettes()[mode]
    assert len(colors) == 16
    for place, color in enumerate(colors):
        following = colors[(place + 1) % len(colors)]
        assert difference(seen(color), seen(following)) >= LEAST_DIFFERENCE, (color, following)

"""Parts of a drawing: axes for numbers, and lanes for calls from one part to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workshop.book.draw import SMALL, SOFT, Box, Drawing


@dataclass(frozen=True, slots=True)
class Axes:
    """Part of a card where numbers have places. `x_of` and `y_of` give them."""

    area: Box
    xlim: tuple[float, float]
    ylim: tuple[float, float]

    def x_of(self, value: float) -> float:
        low, high = self.xlim
        return self.area.x + (value - low) / (high - low) * self.area.width

    def y_of(self, value: float) -> float:
        low, high = self.ylim
        return self.area.y + self.area.height * (1 - (value - low) / (high - low))

    def draw(
        self,
        drawing: Drawing,
        xticks: Mapping[float, str],
        yticks: Mapping[float, str],
        xlabel: str,
        ylabel: str,
    ) -> None:
        """A grid at the ticks. `ylabel` stands above the axis, `xlabel` below."""
        area = self.area
        for value, label in yticks.items():
            y = self.y_of(value)
            drawing.grid(area.x, y, area.x + area.width, y)
            drawing.text(area.x - 8, y, label, size=SMALL, anchor="end", muted=True)
        for value, label in xticks.items():
            x = self.x_of(value)
            drawing.grid(x, area.y, x, area.y + area.height)
            drawing.text(
                x, area.y + area.height + 15, label, size=SMALL, anchor="middle", muted=True
            )
        if ylabel:
            drawing.text(area.x, area.y - 16, ylabel, size=SMALL)
        if xlabel:
            end, bottom = area.x + area.width, area.y + area.height
            drawing.text(end, bottom + 35, xlabel, size=SMALL, anchor="end")


@dataclass(slots=True)
class Lanes:
    """A sequence: a lane for each part, from left to right, and calls from the top down. `x` are
    the lanes' middles; `draw_lanes` comes last, when the length is known."""

    drawing: Drawing
    x: Mapping[str, float]
    y: float  # of the next call
    box_width: float = 120
    fills: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)  # of heads that are not `box_width`

    def call(self, start: str, stop: str, text: str, *, at: float = 0.5) -> None:
        """An arrow, with the call above it, at this share of its length."""
        x0, x1 = self._ends(start, stop)
        x = x0 + (x1 - x0) * at
        self.drawing.text(x, self.y - 12, text, size=SMALL, anchor="middle", mono=True)
        self.drawing.arrow((x0, self.y), (x1, self.y))
        self.y += 38

    def returns(self, start: str, stop: str, text: str) -> None:
        """A dashed arrow, with what is returned above it."""
        x0, x1 = self._ends(start, stop)
        self.drawing.text((x0 + x1) / 2, self.y - 12, text, size=SMALL, anchor="middle", muted=True)
        self.drawing.arrow((x0, self.y), (x1, self.y), dashed=True)
        self.y += 38

    def _ends(self, start: str, stop: str) -> tuple[float, float]:
        away = 5 if self.x[stop] > self.x[start] else -5
        return self.x[start] + away, self.x[stop] - away

    def note(self, lane: str, text: str, *, width: float = 0, fill: str = SOFT) -> None:
        """A box on a lane: it does something by itself."""
        width = width or self.box_width
        height = 14 + 18 * len(text.split("\n"))
        x = self.x[lane] - width / 2
        self.drawing.box(x, self.y - 14, width, height, text, size=SMALL, fill=fill)
        self.y += height + 20

    def draw_lanes(self, top: float, bottom: float) -> None:
        """The heads and the dotted lines, which leave room for every text."""
        rooms = [row.room for text in self.drawing.texts for row in text.rows()]
        rooms += self.drawing.boxes
        for name, x in self.x.items():
            width = self.widths.get(name, self.box_width)
            self.drawing.box(
                x - width / 2, top, width, 24 + 18 * name.count("\n") + 8, name,
                fill=self.fills.get(name, SOFT), size=SMALL, bold=True,
            )  # fmt: skip
            y = top + 32 + 18 * name.count("\n")
            hit = sorted(
                (room.y - 3, room.y + room.height + 3)
                for room in rooms
                if room.x - 3 < x < room.x + room.width + 3 and room.y > top
            )
            for begin, end in [*hit, (bottom, bottom)]:
                if begin > y:
                    self.drawing.line((x, y), (x, begin), dashed=True, width=1)
                y = max(y, end)

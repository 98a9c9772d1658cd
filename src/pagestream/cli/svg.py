"""Svg: a picture being written, element by element. Knows nothing of what it shows.

Used by trace_picture. Looks are classes of the style sheet given to it; lengths are pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr


class Svg:
    def __init__(self, width: float, height: float, style: str, patterns: str) -> None:
        self._size = f"{width:g} {height:g}"
        self._width, self._height = width, height
        self._parts = [f"<style>{style}</style>", f"<defs>{patterns}</defs>"]

    def rect(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" '
            f'width="{_n(width)}" height="{_n(height)}"/>'
        )

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(
            f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def cross(self, kind: str, x: float, y: float, reach: float) -> None:
        self.line(kind, x - reach, y - reach, x + reach, y + reach)
        self.line(kind, x - reach, y + reach, x + reach, y - reach)

    def text(self, kind: str, x: float, y: float, words: str) -> None:
        self.spans(x, y, [("", words)], kind)

    def spans(self, x: float, y: float, parts: Iterable[tuple[str, str]], kind: str = "") -> None:
        """One line of text whose (kind, words) parts look different."""
        inner = " ".join(
            f'<tspan class="{part}">{escape(words)}</tspan>' if part else escape(words)
            for part, words in parts
        )
        look = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{look} x="{_n(x)}" y="{_n(y)}">{inner}</text>')

    def begin(self, tooltip: str) -> None:
        """A group, up to ``end``, that says something when pointed at."""
        self._parts.append(f"<g><title>{escape(tooltip)}</title>")

    def end(self) -> None:
        self._parts.append("</g>")

    def text_of(self, label: str) -> str:
        """The whole file; ``label`` is for those who do not see the picture."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._size}" '
            f'width="{self._width:g}" height="{self._height:g}" role="img" '
            f"aria-label={quoteattr(label)}>"
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")

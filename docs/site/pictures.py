"""Generator of the pictures in ``docs/pictures``: ``python -m docs.site.pictures`` writes them, a test compares them.

Numbers come from the code: the delay levels, the slots of the timing wheel, the delays of retries. The colours are
variables of CSS: from the theme on the site, and the reader's setting anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

from mqtemplate.delay.settings import DelayLevels, TimerSettings
from mqtemplate.delay.timers.timer_log import TIMER_UNIT_SIZE
from mqtemplate.delay.timers.timer_wheel import SLOT_SIZE
from mqtemplate.durations import format_ms
from mqtemplate.engine.group_rules import FIRST_RETRY_LEVEL

FOLDER = Path(__file__).parents[1] / "pictures"

STYLE = """
.picture { --ink: #22343c; --soft: #6b7f88; --paper: #ffffff; --fill: #eaf2f4; --mark: #0b7a75; --warm: #b4570b; }
@media (prefers-color-scheme: dark) {
  .picture { --ink: #dfe9ec; --soft: #93a7af; --paper: #1e2129; --fill: #26343b; --mark: #4fd1c5; --warm: #f0a35e; }
}
.picture text { fill: var(--ink); font: 14px system-ui, sans-serif; }
.picture .small { font-size: 12px; fill: var(--soft); }
.picture .name { font: 13px ui-monospace, monospace; }
.picture .strong { font-weight: 600; }
.picture .box { fill: var(--fill); stroke: var(--soft); }
.picture .mark { fill: var(--mark); stroke: var(--mark); }
.picture .warm { fill: var(--warm); stroke: var(--warm); }
.picture .line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.picture .go { fill: none; stroke: var(--mark); stroke-width: 2; }
.picture .back { fill: none; stroke: var(--warm); stroke-width: 2; stroke-dasharray: 5 4; }
"""
"""One style for all pictures. The site sets the variables for its two schemes."""


class Canvas:
    """An SVG picture in the making. Coordinates are pixels from the upper left corner."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self._name, self._width, self._height, self._title = name, width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Write text; *y* is the base line."""
        classes = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{classes}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: int = 6) -> None:
        """Draw a rectangle with round corners."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{kind}"/>'
        )

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """Draw a circle around a point."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def arrow(self, path: str, kind: str = "go") -> None:
        """Draw a path with a head at its end."""
        head = "back" if kind == "back" else "go"
        self._parts.append(f'<path d="{path}" class="{kind}" marker-end="url(#{self._name}-{head})"/>')

    def line(self, path: str, kind: str = "line") -> None:
        """Draw a path without a head."""
        self._parts.append(f'<path d="{path}" class="{kind}"/>')

    def svg(self) -> str:
        """Return the whole picture as text."""
        heads = "".join(
            f'<marker id="{self._name}-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" class="{colour}"/></marker>'
            for kind, colour in (("go", "mark"), ("back", "warm"))
        )
        lines = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" viewBox="0 0 {self._width} '
            f'{self._height}" width="{self._width}" height="{self._height}">\n<title>{escape(self._title)}</title>\n'
            f"<style>{STYLE}</style>\n<defs>{heads}</defs>\n{lines}\n</svg>\n"
        )


def message_path() -> str:
    """Return the path of a delayed message, from the send to the handler."""
    canvas = Canvas("path", 860, 330, "The path of a delayed message")
    top = [
        ("template.sync_send", "payload to body"),
        ("level or timer?", "keeps the real topic"),
        ("commit log", "flushed, then SEND_OK"),
        ("delay service", "sleeps until it is due"),
    ]
    for number, (name, remark) in enumerate(top):
        _step(canvas, 20 + 212 * number, 30, name, remark)
        if number:
            canvas.arrow(f"M{20 + 212 * number - 26} 62 H{20 + 212 * number - 4}")
    bottom = [
        ("handler", "returns: offset committed"),
        ("listener", "middlewares, arguments"),
        ("real topic", "one append, exactly once"),
    ]
    for number, (name, remark) in enumerate(bottom):
        _step(canvas, 20 + 212 * number, 180, name, remark)
        if number:
            canvas.arrow(f"M{20 + 212 * number - 2} 212 H{20 + 212 * number - 24}")
    canvas.arrow("M749 94 V212 H634")
    canvas.text(738, 136, "due", "strong", "end")
    canvas.text(738, 156, "never early", "small", "end")
    canvas.arrow("M113 244 V300 H810 V98", "back")
    canvas.text(460, 292, "raises: retry topic, a delayed message again; in the end a dead letter", "small")
    return canvas.svg()


def growing() -> str:
    """Return the three places of messages, and the ways between them."""
    canvas = Canvas("growing", 860, 250, "From a folder to a server to a cluster, and back")
    places = [
        ("folder", "one process", "embedded:./data"),
        ("our server", "several processes", "broker:9876"),
        ("RocketMQ cluster", "several machines", "mq1:9876;mq2:9876"),
    ]
    for number, (name, remark, address) in enumerate(places):
        x = 30 + 300 * number
        canvas.box(x, 70, 200, 90)
        canvas.text(x + 100, 98, name, "strong")
        canvas.text(x + 100, 118, remark, "small")
        canvas.text(x + 100, 142, address, "name")
    canvas.arrow("M232 100 H326")
    canvas.text(279, 90, "one address", "small")
    canvas.arrow("M328 130 H234", "back")
    canvas.text(279, 148, "the same folder", "small")
    canvas.arrow("M532 100 H626")
    canvas.text(579, 90, "hand-over", "small")
    canvas.arrow("M628 130 H534", "back")
    canvas.text(579, 148, "abort", "small")
    canvas.arrow("M130 68 V36 H730 V66")
    canvas.text(430, 28, "hand-over, or: mqtemplate hand-over run", "small")
    canvas.arrow("M730 162 V206 H130 V164", "back")
    canvas.text(430, 226, "abort, until it is confirmed", "small")
    return canvas.svg()


def _step(canvas: Canvas, x: float, y: float, name: str, remark: str) -> None:
    canvas.box(x, y, 186, 64)
    canvas.text(x + 93, y + 28, name, "strong")
    canvas.text(x + 93, y + 48, remark, "small")


def timing_wheel() -> str:
    """Return the timing wheel with one slot and its list in the timer log."""
    settings = TimerSettings()
    window_ms = settings.slots_total * settings.precision_ms
    canvas = Canvas("wheel", 860, 380, "The timing wheel and the timer log")
    centre, radius, shown = (190, 190), 132, 24
    canvas.circle(*centre, radius, "line")
    for number in range(shown):
        x, y = _on_circle(centre, radius, number / shown)
        canvas.circle(x, y, 9, "mark" if number == 0 else "warm" if number == 5 else "box")
    canvas.arrow("M190 190 L190 78")
    canvas.text(190, 216, "now", "strong")
    canvas.text(
        190,
        236,
        f"{settings.slots_total:,} slots of {format_ms(settings.precision_ms)}: {format_ms(window_ms)}",
        "small",
    )
    canvas.text(190, 360, f"a slot: {SLOT_SIZE} bytes with both ends of its list", "small")
    x, y = _on_circle(centre, radius, 5 / shown)
    canvas.arrow(f"M{x + 12:.1f} {y:.1f} C 400 {y:.0f}, 420 150, 470 150", "back")
    canvas.arrow(f"M{x + 8:.1f} {y - 10:.1f} C 400 40, 768 20, 768 126", "back")
    canvas.text(480, 92, "timer log", "strong", "start")
    canvas.text(480, 114, f"units of {TIMER_UNIT_SIZE} bytes, a list from last to first", "small", "start")
    units = [(480, "first"), (600, ""), (720, "last")]
    for at, name in units:
        canvas.box(at, 130, 96, 44)
        canvas.text(at + 48, 157, name or "…", "name")
    canvas.arrow("M720 182 C 700 210, 670 210, 652 182")
    canvas.arrow("M600 182 C 580 210, 550 210, 532 182")
    canvas.text(522, 272, "commit log", "strong", "start")
    canvas.box(480, 284, 336, 40)
    for at in (500, 566, 650, 752):
        canvas.box(at, 291, 44, 26, "mark", 3)
    for start, end in ((510, 510), (648, 672), (768, 774)):
        canvas.arrow(f"M{start} 176 C {start} 230, {end} 240, {end} 288", "back")
    canvas.text(480, 346, "the messages; memory does not grow with the backlog", "small", "start")
    return canvas.svg()


def _on_circle(centre: tuple[int, int], radius: int, turn: float) -> tuple[float, float]:
    angle = 2 * math.pi * turn - math.pi / 2
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


def retry_ladder() -> str:
    """Return the delays of RocketMQ's retries as bars on a logarithmic scale."""
    delays = DelayLevels.parse().delays_ms[FIRST_RETRY_LEVEL - 1 :]
    canvas = Canvas("retries", 860, 340, "The delays of retries")
    canvas.text(20, 30, "Delay before each retry, on a logarithmic scale", "strong", "start")
    step, floor = 48, 270
    for number, delay_ms in enumerate(delays):
        height = 34 + 190 * math.log(delay_ms / delays[0]) / math.log(delays[-1] / delays[0])
        x = 24 + step * number
        canvas.box(x, floor - height, 34, height, "mark", 3)
        canvas.text(x + 17, floor - height - 8, format_ms(delay_ms), "small")
        canvas.text(x + 17, floor + 20, str(number + 1), "small")
    x = 24 + step * len(delays)
    canvas.box(x, floor - 34, 34, 34, "warm", 3)
    canvas.text(x + 17, floor - 44, "DLQ", "small")
    total = format_ms(sum(delays))
    canvas.text(24, 320, f"{len(delays)} retries in {total}, then the dead-letter topic.", "small", "start")
    return canvas.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "message-path": message_path,
    "timing-wheel": timing_wheel,
    "retry-ladder": retry_ladder,
    "growing": growing,
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()

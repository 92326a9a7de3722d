"""Write docs/architecture.svg: the processes, what they say to each other, and what is on disk."""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "architecture.svg"

WIDTH, HEIGHT = 960, 430
INK, PAPER, LINE, ACCENT = "#263238", "#fafafa", "#78909c", "#cfd8dc"

BOXES = (
    # x, y, width, height, title, lines
    (
        20,
        30,
        240,
        80,
        "your program",
        ("tinsmith SDK, or tinker SDK", "training loop, data, rewards"),
    ),
    (20, 170, 240, 60, "command line, browser", ("tinsmith …, openai client",)),
    (
        380,
        30,
        250,
        200,
        "server process",
        (
            "routes: decode, authorise, check",
            "recording: log before answer",
            "scheduler: by number, by tokens",
            "futures: long polls wait here",
            "recovery: snapshot + replay",
        ),
    ),
    (
        740,
        30,
        200,
        200,
        "engine process",
        (
            "torch, CPU or CUDA",
            "base models, shared",
            "adapters: one row each",
            "passes, steps, sampling",
            "samplers: frozen copies",
        ),
    ),
    (380, 320, 250, 80, "store", ("SQLite file, or Postgres", "log, keys, runs, results")),
    (740, 320, 200, 80, "data folder", ("snapshots, checkpoints", "large requests")),
)

ARROWS = (
    # x1, y1, x2, y2, label, label x, label y
    (260, 70, 380, 70, "JSON, protobuf", 274, 60),
    (260, 200, 380, 200, "HTTP", 300, 190),
    (630, 110, 740, 110, "batches", 658, 100),
    (740, 160, 630, 160, "results", 660, 150),
    (505, 230, 505, 320, "one writer, synced", 515, 280),
    (600, 230, 740, 345, "", 0, 0),
    (840, 230, 840, 320, "synced, renamed", 846, 280),
)


def page() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="14" role="img" '
        'aria-label="The parts of Tinsmith">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
        "</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
    ]
    for x, y, width, height, title, lines in BOXES:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="white" '
            f'stroke="{LINE}"/><rect x="{x}" y="{y}" width="{width}" height="26" rx="6" '
            f'fill="{ACCENT}"/>'
        )
        parts.append(_text(x + 10, y + 18, title, "bold"))
        parts += [_text(x + 10, y + 46 + 26 * i, line) for i, line in enumerate(lines)]
    for x1, y1, x2, y2, label, label_x, label_y in ARROWS:
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="2" '
            'marker-end="url(#tip)"/>'
        )
        if label:
            parts.append(_text(label_x, label_y, label, "normal", 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, weight: str = "normal", size: int = 14) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{INK}" font-weight="{weight}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET.relative_to(ROOT)}")

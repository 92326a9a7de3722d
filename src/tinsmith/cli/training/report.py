"""The report of a run: curves, samples before and after, and how to go on; Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tinsmith.cli.training import plot
from tinsmith.cli.training import settings as run_settings
from tinsmith.cli.training.methods import Chart
from tinsmith.cli.training.run_folder import RunFolder

MARKDOWN_FILE = "report.md"
HTML_FILE = "report.html"

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3rem .6rem;"
    "text-align:left;vertical-align:top}pre{background:#f4f4f4;padding:.8rem;overflow-x:auto}"
    "td{white-space:pre-wrap;overflow-wrap:anywhere}"
)


@dataclass(frozen=True, slots=True)
class Report:
    folder: RunFolder
    charts: Sequence[Chart]
    facts: Mapping[str, Any]

    def write(self) -> None:
        pictures = self._pictures()
        for name, picture in pictures.items():
            (self.folder.path / name).write_text(picture, "utf-8")
        (self.folder.path / MARKDOWN_FILE).write_text(self._markdown(list(pictures)), "utf-8")
        (self.folder.path / HTML_FILE).write_text(self._html(list(pictures.values())), "utf-8")

    def _pictures(self) -> dict[str, str]:
        """SVGs by the name of their file."""
        metrics = self.folder.metrics()
        pictures = {}
        for chart in self.charts:
            curves = {
                name: [(line["step"], line[key]) for line in metrics if key in line]
                for name, key in chart.curves.items()
            }
            first = next(iter(chart.curves.values()))
            shown = {name: curve for name, curve in curves.items() if curve}
            pictures[f"{first}.svg"] = plot.svg(shown, chart.title)
        return pictures

    def _markdown(self, pictures: Sequence[str]) -> str:
        parts = [f"# {self._title}", _markdown_table(["", ""], self._fact_rows())]
        parts += [f"![{name}]({name})" for name in pictures]
        if rows := self._sample_rows():
            parts += ["## Before and after", _markdown_table(_SAMPLE_COLUMNS, rows)]
        commands = "\n".join(f"# {remark}\n{text}" for text, remark in self._commands())
        parts += ["## Going on", f"```bash\n{commands}\n```"]
        parts += ["## Settings", _markdown_table(["Setting", "Value"], self._setting_rows())]
        return "\n\n".join(parts) + "\n"

    def _html(self, pictures: Sequence[str]) -> str:
        title = escape(self._title)
        parts = [f"<h1>{title}</h1>", _html_table([], self._fact_rows()), *pictures]
        if rows := self._sample_rows():
            parts += ["<h2>Before and after</h2>", _html_table(_SAMPLE_COLUMNS, rows)]
        commands = "\n".join(f"# {remark}\n{text}" for text, remark in self._commands())
        parts += ["<h2>Going on</h2>", f"<pre>{escape(commands)}</pre>"]
        parts += ["<h2>Settings</h2>", _html_table(["Setting", "Value"], self._setting_rows())]
        body = "\n".join(parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
        )

    @property
    def _title(self) -> str:
        return f"{self.folder.settings.name}: {self.folder.method} of {self.facts['model']}"

    def _fact_rows(self) -> list[list[str]]:
        return [[name, shown(value)] for name, value in self.facts.items() if value is not None]

    def _setting_rows(self) -> list[list[str]]:
        saved = run_settings.saved(self.folder.settings)
        return [[name, shown(value)] for name, value in saved.items() if value not in (None, ())]

    def _sample_rows(self) -> list[list[str]]:
        samples = self.folder.samples()
        if not {"prompt", "before", "after"} <= samples.keys():
            return []
        return [
            list(row)
            for row in zip(samples["prompt"], samples["before"], samples["after"], strict=True)
        ]

    def _commands(self) -> list[tuple[str, str]]:
        return going_on(self.facts)


_SAMPLE_COLUMNS = ("Prompt", "Before", "After")


def going_on(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Commands to try next, each with a remark."""
    weights = facts.get("best_checkpoint") or facts["sampler_checkpoint"]
    return [
        (f"tinsmith chat {weights}", "talk to it"),
        (f"tinsmith eval {weights} DATA --check contains", "measure it on prompts with answers"),
        (f"tinsmith train rl DATA --from {facts['checkpoint']}", "train it further"),
        (f"tinsmith export {facts['checkpoint']} -o adapter", "take it elsewhere"),
    ]


def shown(value: Any) -> str:
    """
    >>> shown(0.123456789)
    '0.1235'
    """
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        whole = (escape(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(whole)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    head = [line("th", columns)] if columns else []
    return "\n".join(["<table>", *head, *(line("td", row) for row in rows), "</table>"])

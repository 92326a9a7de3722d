"""The notebook is committed without outputs, and runs from top to bottom on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def read() -> Any:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_the_notebook_holds_no_output() -> None:
    for cell in read().cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.slow
def test_the_notebook_runs_and_the_loss_falls(
    shared_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in shared_server.items():
        monkeypatch.setenv(name, value)
    notebook = read()
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=shared_server)
    printed = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    losses = [float(line.split()[2]) for line in printed[2].splitlines()]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert "after:" in printed[3]
    assert "/sampler_weights/quickstart" in printed[4]

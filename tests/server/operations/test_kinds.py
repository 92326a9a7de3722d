"""The table of kinds: complete, and the only place that says what a kind does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tinsmith.server
from tinsmith.server.operations.kinds import KINDS, changed_model
from tinsmith.server.operations.operation import Kind, SingleKind
from tinsmith.server.store.records import OperationRecord

SERVER = Path(tinsmith.server.__file__).parent


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_that_runs_by_itself_is_replayed_exactly_if_it_changes_the_model(kind: Kind) -> None:
    if isinstance(kind, SingleKind):
        assert (kind.replay is not None) == kind.changes_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("took_effect", [False, True])
@pytest.mark.parametrize("category", [None, "user", "server"])
def test_what_is_replayed_is_what_took_effect_whatever_its_error_was(
    kind: str, took_effect: bool, category: str | None
) -> None:
    record = OperationRecord(
        request_id="r",
        model_id="m",
        seq_id=1,
        owner="o",
        kind=kind,
        content_type="",
        created_at=0.0,
        status="failed" if category else "done",
        category=category,
        took_effect=took_effect,
    )
    assert changed_model(record) == (took_effect and KINDS[kind].changes_model)


def test_no_module_keeps_a_list_of_kinds_of_its_own() -> None:
    """Two names of kinds in one literal are a second table, where a new kind would be missing."""
    found = []
    for file in SERVER.rglob("*.py"):
        if file.name == "kinds.py" or "migrations" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = [e.value for e in node.elts if isinstance(e, ast.Constant)]
            elif isinstance(node, ast.Dict):
                names = [k.value for k in node.keys if isinstance(k, ast.Constant)]
            else:
                continue
            if sum(name in KINDS for name in names) > 1:
                found.append(f"{file.name}:{node.lineno}")
    assert found == []

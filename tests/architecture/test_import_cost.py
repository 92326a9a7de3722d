"""`import tinsmith` is light, whatever else is installed."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pydantic", "google.protobuf", "httpx", "zstandard")


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("heavy", HEAVY)
def test_importing_the_package_loads_nothing_heavy(heavy: str) -> None:
    """S13, S27: no torch, no transformers, no pydantic."""
    assert heavy not in modules_after("import tinsmith")


def test_encoding_and_decoding_need_no_torch() -> None:
    """S12, S13"""
    program = (
        "import tinsmith as t\n"
        "from tinsmith.wire import proto, json\n"
        "d = t.Datum(model_input=t.ModelInput.from_ints([1]), loss_fn_inputs={'weights': [1.0]})\n"
        "i = t.types.ForwardBackwardInput([d], 'cross_entropy')\n"
        "r = t.types.ForwardBackwardRequest(i, 'm', 1)\n"
        "assert proto.decode_pass(proto.encode_pass(r)) == r\n"
        "json.encode(t.AdamParams())"
    )
    assert "torch" not in modules_after(program)

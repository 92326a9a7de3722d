"""Give checkpoints to the cookbook: `base adapter target` for each, in one process.

Writes the merged model to `target/merged` and the adapter for serving to `target/adapter`, where
the cookbook makes one of that family.
"""

import sys

from tinker_cookbook.exceptions import WeightsAdapterError
from tinker_cookbook.weights import build_hf_model, build_lora_adapter

for line in sys.stdin:
    base, adapter, target = line.split()
    build_hf_model(
        base_model=base, adapter_path=adapter, output_path=f"{target}/merged", dtype="float32"
    )
    try:
        build_lora_adapter(base_model=base, adapter_path=adapter, output_path=f"{target}/adapter")
    except WeightsAdapterError as error:
        assert "deepseek_v3" in str(error), error

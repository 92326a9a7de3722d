"""Run by vLLM's own Python: what it makes of some tokens, with a model that we have exported.

Reads {"model", "adapter", "tokens", "dtype"} as JSON from its input. The last line that it prints
is JSON, too: the log-probability of every token but the first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.kernels.linear import MPLinearKernel, register_linear_kernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

BITS = 8


class EightBits(MPLinearKernel):
    """x · Wᵀ by the definition: vLLM has no product with weights in 8 bits for the CPU.

    What was read, and which rows of which matrix went where, is vLLM's own work.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return c.weight_type == scalar_types.uint8b128, "for 8 bits alone"

    def process_weights_after_loading(self, layer: Any) -> None:
        words, scales, _ = self._get_weight_params(layer)  # (out, in / 4), (out, in / group)
        shifts = torch.arange(0, 32, BITS)
        numbers = ((words.data[..., None] >> shifts) & 0xFF).flatten(1) - 2 ** (BITS - 1)
        steps = scales.data.repeat_interleave(self.config.group_size, 1)
        layer.whole = numbers.to(steps.dtype) * steps

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.whole, bias)


def main() -> None:
    asked = json.load(sys.stdin)
    register_linear_kernel(EightBits, PlatformEnum.CPU, "mp")
    llm = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        enforce_eager=True,
        enable_lora=asked["adapter"] is not None,
        max_lora_rank=8,
        max_num_seqs=2,
    )
    lora = LoRARequest("ours", 1, asked["adapter"]) if asked["adapter"] else None
    tokens = asked["tokens"]
    (found,) = llm.generate(
        {"prompt_token_ids": tokens},
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        lora_request=lora,
    )
    pairs = zip(found.prompt_logprobs[1:], tokens[1:], strict=True)
    print(json.dumps([entries[token].logprob for entries, token in pairs]))


if __name__ == "__main__":
    main()

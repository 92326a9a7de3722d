"""Tokens a second of llama.cpp, for `sampling.py`; runs where `xllamacpp` is installed.

    python benchmarks/llama_sampling.py GGUF PROMPT_TOKENS NEW_TOKENS

Prints one JSON object: the rate for one request and for sixteen at once, prompts included.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

CONCURRENT = 16
ROUNDS = 3


def main() -> None:
    path, prompt_tokens, new_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = CONCURRENT
    params.n_ctx = CONCURRENT * (prompt_tokens + new_tokens + 16)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)

    def complete(seed: int) -> int:
        prompt = random.Random(seed).choices(range(3, 49_000), k=prompt_tokens)
        request = {"prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "seed": seed}
        answer = server.handle_completions({**request, "cache_prompt": False})
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        return int(answer.get("usage", {}).get("completion_tokens") or answer["tokens_predicted"])

    found = {}
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for count in (1, CONCURRENT):
            rates = []
            for number in range(ROUNDS + 1):
                start = time.perf_counter()
                total = sum(pool.map(complete, range(number * count, (number + 1) * count)))
                rates.append(total / (time.perf_counter() - start))
            found[f"{count}_tokens_per_s"] = round(statistics.median(rates[1:]), 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

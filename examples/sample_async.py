"""Many samples at once, with asyncio."""

import argparse
import asyncio
import time

import tinsmith

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=16, help="how many prompts to continue")
options = parser.parse_args()


async def main() -> None:
    async with tinsmith.ServiceClient() as service:
        training = await service.create_lora_training_client_async(options.model, rank=8)
        tokenizer = await asyncio.to_thread(training.get_tokenizer)
        sampler = await training.save_weights_and_get_sampling_client_async()
        params = tinsmith.SamplingParams(max_tokens=24, temperature=0.8, seed=1)

        async def ask(number: int) -> str:
            prompt = f"The number {number} is"
            tokens = tinsmith.ModelInput.from_ints(tokenizer.encode(prompt))
            response = await sampler.sample_async(tokens, 1, params)
            return f"{prompt}{tokenizer.decode(response.sequences[0].tokens)}"

        started = time.monotonic()
        for text in await asyncio.gather(*(ask(number) for number in range(options.steps))):
            print(repr(text))
        print(f"{options.steps} samples in {time.monotonic() - started:.1f} s")


asyncio.run(main())

"""tinker-cookbook's own reinforcement learning loop: `python … CLIENT LOG_FOLDER TOKENIZER`.

Groups of answers are rewarded for the letter they should hold. Prints the metrics it logged.
"""

import asyncio
import functools
import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
client, folder, tokenizer_folder = sys.argv[1:]
if client == "tinsmith":
    import tinsmith.compat

    tinsmith.compat.install()

import chz  # noqa: E402  # which client the rest imports was decided above
import tinker  # noqa: E402
from tinker_cookbook import renderers, tokenizer_utils  # noqa: E402
from tinker_cookbook.rl import problem_env, train, types  # noqa: E402

assert tinker.ServiceClient.__module__.startswith(client), tinker.ServiceClient.__module__
MODEL = os.environ["MODEL"]


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


tokenizer_utils.register_tokenizer(MODEL, tokenizer)


class Letter(problem_env.ProblemEnv):
    def __init__(self, letter, renderer):
        super().__init__(renderer)
        self.letter = letter

    def get_question(self):
        return f"Say {self.letter}"

    def check_answer(self, sample_str):
        return self.letter in sample_str

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return self.letter


class Letters(types.RLDataset):
    def __init__(self):
        renderer = renderers.get_renderer("role_colon", tokenizer())
        self.builders = [
            problem_env.ProblemGroupBuilder(
                env_thunk=functools.partial(Letter, letter, renderer), num_envs=8
            )
            for letter in "aeiou"
        ]

    def get_batch(self, index):
        return self.builders

    def __len__(self):
        return 3


@chz.chz
class Builder(types.RLDatasetBuilder):
    async def __call__(self):
        return Letters(), None


if client == "tinsmith":
    tinsmith.compat.log_to_console()
config = train.Config(
    learning_rate=0.01,
    dataset_builder=Builder(),
    model_name=MODEL,
    recipe_name="recipe_test",
    renderer_name="role_colon",
    max_tokens=12,
    log_path=folder,
    lora_rank=4,
    eval_every=0,
    save_every=2,
)
asyncio.run(train.main(config))
logged = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
saved = (Path(folder) / "checkpoints.jsonl").read_text().splitlines()
print(json.dumps({"steps": logged, "saved": len(saved)}))

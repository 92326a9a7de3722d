"""tinker-cookbook's recipe `rl_basic` for some models: `python … FOLDER TOKENIZER MODEL…`.

As it stands, with the renderer that it has for each model's name; only the problems are a few of
our own, since its are on a hub, batches are small, and the learning rate is that of tiny models.
Prints for each model the renderer and what the recipe logged.
"""

import asyncio
import functools
import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
folder, tokenizer_folder, *models = sys.argv[1:]
import tinsmith.compat  # noqa: E402

tinsmith.compat.install()

import chz  # noqa: E402  # which client the rest imports was decided above
import tinker  # noqa: E402
from tinker_cookbook import renderers, tokenizer_utils  # noqa: E402
from tinker_cookbook.recipes import rl_basic  # noqa: E402
from tinker_cookbook.rl import problem_env, train, types  # noqa: E402

assert tinker.ServiceClient.__module__.startswith("tinsmith")
assert models[0] == rl_basic.DEFAULT_MODEL_NAME, rl_basic.DEFAULT_MODEL_NAME


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


class Letter(problem_env.ProblemEnv):
    def __init__(self, letter, renderer):
        super().__init__(renderer)
        self.letter = letter

    def get_question(self):
        return f"Say {self.letter}"

    def check_answer(self, sample_str):
        return self.letter in sample_str

    def check_format(self, sample_str):
        return len(sample_str) % 2 == 0

    def get_reference_answer(self):
        return self.letter


class Letters(types.RLDataset):
    def __init__(self, renderer_name):
        renderer = renderers.get_renderer(renderer_name, tokenizer())
        self.builders = [
            problem_env.ProblemGroupBuilder(
                env_thunk=functools.partial(Letter, letter, renderer), num_envs=6
            )
            for letter in "aei"
        ]

    def get_batch(self, index):
        return self.builders

    def __len__(self):
        return 2


@chz.chz
class Builder(types.RLDatasetBuilder):
    renderer_name: str

    async def __call__(self):
        return Letters(self.renderer_name), None


def run(model):
    tokenizer_utils.register_tokenizer(model, tokenizer)
    recipe = rl_basic.build_config_blueprint(model)
    renderer_name = recipe.make().renderer_name
    log = Path(folder) / model.replace("/", "-")
    changes = {
        "log_path": str(log),
        "dataset_builder": Builder(renderer_name=renderer_name),
        "learning_rate": 0.01,
        "max_tokens": 12,
        "remove_constant_reward_groups": False,
    }
    asyncio.run(train.main(recipe.apply(changes).make()))
    logged = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return {"renderer": renderer_name, "steps": logged}


print(json.dumps({model: run(model) for model in models}))

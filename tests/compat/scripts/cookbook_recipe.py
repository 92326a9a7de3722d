"""tinker-cookbook's recipe `sl_basic` for some models: `python … FOLDER TOKENIZER MODEL…`.

As it stands, with the settings and the renderer that it has for each model's name; only the
conversations are a few of our own, since its are on a hub, and the learning rate is that of tiny
models. Prints for each model the renderer and the losses that the recipe logged.
"""

import asyncio
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
from tinker_cookbook.recipes import sl_basic  # noqa: E402
from tinker_cookbook.supervised import data as supervised_data  # noqa: E402
from tinker_cookbook.supervised import train, types  # noqa: E402

assert tinker.ServiceClient.__module__.startswith("tinsmith")
assert models[0] == sl_basic.DEFAULT_MODEL_NAME, sl_basic.DEFAULT_MODEL_NAME
PAIRS = [("What is tin?", "A metal."), ("And iron?", "Another."), ("Gold?", "Dear."), ("2+2", "4")]


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


class Conversations(types.SupervisedDataset):
    def __init__(self, renderer_name):
        renderer = renderers.get_renderer(renderer_name, tokenizer())
        self.data = [
            supervised_data.conversation_to_datum(
                [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
                renderer,
                max_length=512,
            )
            for a, b in PAIRS
        ]

    def get_batch(self, index):
        return self.data

    def __len__(self):
        return 1

    def set_epoch(self, seed=0):
        pass


@chz.chz
class Builder(types.SupervisedDatasetBuilder):
    renderer_name: str

    def __call__(self):
        return Conversations(self.renderer_name), None


def run(model):
    tokenizer_utils.register_tokenizer(model, tokenizer)
    recipe = sl_basic.build_config_blueprint(model)
    renderer_name = recipe.make().renderer_name
    log = Path(folder) / model.replace("/", "-")
    changes = {
        "log_path": str(log),
        "dataset_builder": Builder(renderer_name=renderer_name),
        "num_epochs": 3,
        "learning_rate": 0.02,
    }
    asyncio.run(train.main(recipe.apply(changes).make()))
    logged = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    losses = [each["train_mean_nll"] for each in logged if "train_mean_nll" in each]
    return {"renderer": renderer_name, "losses": losses}


print(json.dumps({model: run(model) for model in models}))

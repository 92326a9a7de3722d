"""tinker-cookbook's own supervised loop: `python … CLIENT LOG_FOLDER CHECKPOINT TOKENIZER`.

Renders conversations, trains with evaluations and periodic saves, stops, and resumes from its own
checkpoint list. Prints the metrics that the cookbook logged.
"""

import asyncio
import importlib
import json
import os
import pkgutil
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
client, folder, checkpoint, tokenizer_folder = sys.argv[1:]
if client == "tinsmith":
    import tinsmith.compat

    tinsmith.compat.install()

import chz  # noqa: E402  # which client the rest imports was decided above
import tinker  # noqa: E402
import tinker_cookbook  # noqa: E402
from tinker_cookbook import renderers, tokenizer_utils  # noqa: E402
from tinker_cookbook.supervised import data as supervised_data  # noqa: E402
from tinker_cookbook.supervised import train, types  # noqa: E402

assert tinker.ServiceClient.__module__.startswith(client), tinker.ServiceClient.__module__
MODEL = os.environ["MODEL"]

# Needs what is no part of the cookbook's plain install, or starts servers.
APART = ("recipes", "third_party", "sandbox", "xmux", "chat_app", "eval", "scripts", "inference")
imported = 0
for found in pkgutil.walk_packages(tinker_cookbook.__path__, "tinker_cookbook."):
    if not set(found.name.split(".")) & set(APART) and not found.name.endswith("_test"):
        importlib.import_module(found.name)
        imported += 1


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


tokenizer_utils.register_tokenizer(MODEL, tokenizer)
PAIRS = [("What is tin?", "A metal."), ("And iron?", "Another."), ("Gold?", "Dear."), ("2+2", "4")]


class Conversations(types.SupervisedDataset):
    def __init__(self):
        renderer = renderers.get_renderer("role_colon", tokenizer())
        self.data = [
            supervised_data.conversation_to_datum(
                [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
                renderer,
                max_length=100,
            )
            for a, b in PAIRS * 3
        ]

    def get_batch(self, index):
        return self.data[4 * index : 4 * index + 4]

    def __len__(self):
        return 3

    def set_epoch(self, seed=0):
        pass


@chz.chz
class Builder(types.SupervisedDatasetBuilder):
    def __call__(self):
        return Conversations(), Conversations()


def run(max_steps):
    config = train.Config(
        log_path=folder,
        model_name=MODEL,
        recipe_name="recipe_test",
        load_checkpoint_path=checkpoint,
        renderer_name="role_colon",
        dataset_builder=Builder(),
        learning_rate=0.01,
        num_epochs=2,
        save_every=2,
        eval_every=2,
        max_steps=max_steps,
    )
    asyncio.run(train.main(config))


run(3)
# As if it had been interrupted after its first save: the next run goes on from there.
saves = Path(folder) / "checkpoints.jsonl"
saves.write_text(saves.read_text().splitlines(keepends=True)[0])
run(6)
logged = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
kept = ("train_mean_nll", "test/nll", "learning_rate", "num_tokens", "epoch")
print(
    json.dumps(
        {
            "imported": imported,
            "steps": [{k: each[k] for k in ("step", *kept) if k in each} for each in logged],
        }
    )
)

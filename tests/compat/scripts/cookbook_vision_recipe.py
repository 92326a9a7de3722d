"""tinker-cookbook's recipe `vlm_classifier` on its own model: `python … FOLDER TOKENIZER MODEL`.

As it stands, with the renderer that it says; only the photos are a few of our own, since its are on
a hub, and batches and the learning rate are those of tiny models. MODEL is the model's folder, for
its image processor. Prints the model's name, what the recipe logged, and what its evaluation did.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
folder, tokenizer_folder, model_folder = sys.argv[1:]
import tinsmith.compat  # noqa: E402

tinsmith.compat.install()

import datasets  # noqa: E402  # which client the rest imports was decided above
import numpy as np  # noqa: E402
import tinker  # noqa: E402
from PIL import Image  # noqa: E402
from tinker_cookbook import tokenizer_utils  # noqa: E402
from tinker_cookbook.recipes.vlm_classifier import data, eval, train  # noqa: E402

assert tinker.ServiceClient.__module__.startswith("tinsmith")


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


def image_processor(_):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(model_folder)


class Photos(datasets.DatasetDict):
    """As much of a data set as the recipe uses."""

    sizes = ((24, 16), (40, 17), (16, 16), (33, 9))

    @property
    def features(self):
        return {"label": datasets.ClassLabel(names=["tin_can", "pewter"])}

    def __getitem__(self, key):
        if isinstance(key, str):
            return self
        width, height = self.sizes[key]
        pixels = np.random.default_rng(key).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return {"image": Image.fromarray(pixels), "label": key % 2}

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        return (self[key] for key in range(len(self)))

    def shuffle(self, seed):
        return self


config = train.ExperimentConfig(
    experiment_dir=folder,
    learning_rate=0.02,
    lr_schedule="constant",
    lora_rank=8,
    batch_size=4,
    num_epochs=4,
    max_tokens=8,
    n_eval=4,
    eval_every=2,
)
tokenizer_utils.register_tokenizer(config.model_name, tokenizer)
datasets.load_dataset = lambda _: Photos()
data.get_image_processor = eval.get_image_processor = image_processor
train.run_experiment(config)
(log,) = Path(folder).glob("*/metrics.jsonl")
logged = [json.loads(line) for line in log.read_text().splitlines()]
print(json.dumps({"model": config.model_name, "renderer": config.renderer_name, "steps": logged}))

"""The two trainers that are compared: our engine, and `transformers` with PEFT.

Both hold the same base model (SmolLM2-135M as it is shipped, or a shape with random weights) and
adapters of rank 32 on every linear layer of the blocks; the unembedding is not adapted.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.engine.base import Pass
from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder, build
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.model.sources import model_folder
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.passes import graphs_of, run_passes
from tinsmith.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, ModelInput

RANK = 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
_COMMON = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


def make_data(
    lengths: Sequence[int], vocab_size: int, *, prompt_share: float = 0.0, seed: int = 0
) -> list[Datum]:
    """Random sequences; the first `prompt_share` of each has no weight in the loss."""
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = random.integers(0, vocab_size, length + 1)
        weights = np.ones(length, dtype=np.float32)
        weights[: int(length * prompt_share)] = 0.0
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


class Ours:
    """The engine's training passes, called directly."""

    def __init__(self, device: torch.device, shape: str | None) -> None:
        self.config = LocalEngineConfig(device="cuda" if device.type == "cuda" else "cpu")
        self.decoder = _load_decoder(device, shape)
        self.pool = AdapterPool(self.decoder.config, device, self.decoder.dtype)
        self.adapters: dict[str, Adapter] = {}
        self.graphs = graphs_of(self.decoder)

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    def add_adapters(self, count: int, rank: int = RANK) -> list[str]:
        """The ids of the first `count` adapters, made where they are not there yet."""
        ids = [str(number) for number in range(count)]
        for name in ids:
            if name not in self.adapters:
                lora = LoraConfig(rank=rank, seed=0, train_unembed=False)
                self.adapters[name] = self.pool.create("benchmark", lora)
        return ids

    def forward_backward(self, data: dict[str, list[Datum]]) -> None:
        """One pass for each adapter named, all in one call; gradients are then forgotten."""
        passes = [Pass(adapter_id=i, data=d, loss_fn="cross_entropy") for i, d in data.items()]
        results = run_passes(passes, self.adapters, self.decoder, self.config, graphs=self.graphs)
        for finished in results:
            if finished is not None and not isinstance(finished.result, ForwardBackwardOutput):
                raise RuntimeError(finished.result.message)
        for name in data:
            self.adapters[name].drop_gradient()

    def optim_step(self, name: str) -> None:
        adamw_step(self.adapters[name], AdamParams(learning_rate=1e-4))

    def base_flops_a_token(self) -> float:
        """Operations of a pass on the frozen base: 2 for each weight forward, 2 backward."""
        return 4.0 * sum(weight.numel() for weight in self.base_weights())

    def products(self, name: str, num_tokens: int) -> Callable[[], None]:
        """Every matrix product of a pass with the base's weights and an adapter's, in the shapes
        they have there, and nothing else: what is left when all the rest costs no time."""
        base, adapter = self.base_weights(), self.adapters[name].weights()
        sizes = {size for weight in base for size in weight.shape}
        sizes |= {size for low_rank in adapter.values() for b in low_rank.b for size in b.shape}
        like = {"device": self.decoder.device, "dtype": self.decoder.dtype}
        rows = {size: torch.randn(num_tokens, size, **like) for size in sizes}

        def work() -> None:
            for weight in base:
                rows[weight.shape[1]] @ weight.t()
                rows[weight.shape[0]] @ weight
            for a, b in adapter.values():
                x = rows[a.shape[1]]
                inner = x @ a.t()
                inner @ a
                inner.t() @ x
                for part, b_of in zip(inner.split(b[0].shape[1], dim=1), b, strict=True):
                    grad = rows[len(b_of)]
                    part @ b_of.t()
                    grad @ b_of
                    grad.t() @ part

        return work

    def base_weights(self) -> list[torch.Tensor]:
        """Those that every token is multiplied with."""
        linears = [linear for layer in self.decoder.layers for linear in layer.linears]
        return [self.decoder.head.weight, *(linear.weight for linear in linears)]


class Peft:
    """A plain loop over padded batches, with as many adapters as asked for."""

    def __init__(self, device: torch.device, shape: str | None) -> None:
        import peft

        self.device = device
        lora = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, lora_dropout=0.0)
        self._lora = lora
        self.model = peft.get_peft_model(load_transformers(device, shape), lora, "0")
        self._names = {"0"}
        self.model.train()

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def base_flops_a_token(self) -> float:
        """As of ours; norms and adapters are left out."""
        weights = {
            id(weight): weight.numel()
            for name, weight in self.model.named_parameters()
            if weight.ndim == 2 and "lora_" not in name
        }
        return 4.0 * sum(weights.values())

    def add_adapters(self, count: int) -> list[str]:
        ids = [str(number) for number in range(count)]
        for name in ids:
            if name not in self._names:
                self.model.add_adapter(name, self._lora)
                self._names.add(name)
        return ids

    def forward_backward(self, data: dict[str, list[Datum]]) -> None:
        """Padded batches for each adapter named, one after another.

        On the CPU they are of eight sequences, each padded to its own longest: 32 at once would
        take more memory than a small machine has.
        """
        size = 32 if self.device.type == "cuda" else 8
        for name, datums in data.items():
            if len(self._names) > 1:
                self.model.set_adapter(name)
            for start in range(0, len(datums), size):
                self._run(datums[start : start + size])
        self.model.zero_grad(set_to_none=True)

    def _run(self, datums: list[Datum]) -> None:
        longest = max(datum.model_input.length for datum in datums)
        shape = (len(datums), longest)
        tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for row, datum in enumerate(datums):
            length = datum.model_input.length
            tokens[row, :length] = datum.model_input.tokens_np()
            mask[row, :length] = 1
            targets[row, :length] = datum.loss_fn_inputs["target_tokens"].numpy
            weights[row, :length] = datum.loss_fn_inputs["weights"].numpy
        on = self._tensor
        is_padded = not mask.all()
        logits = self.model(
            input_ids=on(tokens), attention_mask=on(mask) if is_padded else None, use_cache=False
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), on(targets).flatten(), reduction="none"
        )
        (losses * on(weights).flatten()).sum().backward()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


class RandomWeights:
    """Stands where a model's files would be."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_tied: bool = True) -> None:
        self._device, self._dtype = device, dtype
        self._is_tied = is_tied
        torch.manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name != "lm_head.weight" or not self._is_tied

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        options: dict[str, Any] = {"device": self._device, "dtype": dtype or self._dtype}
        if name.endswith(("bias", "sinks")):
            # The same for every token, they would drown what tells tokens apart.
            return torch.zeros(shape, **options)
        if len(shape) == 1:
            return torch.ones(shape, **options)
        return torch.randn(shape, **options).mul_(0.02)


def _load_decoder(device: torch.device, shape: str | None) -> Decoder:
    if shape is None:
        decoder = Decoder.load(_embedded_folder(), device)
        decoder.allow_packing()
        return decoder
    with _config_folder(shape) as folder:
        return build(read_config(folder), RandomWeights(device, torch.bfloat16))


def load_transformers(device: torch.device, shape: str | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape is None:
        model = AutoModelForCausalLM.from_pretrained(_embedded_folder(), dtype=torch.float32)
        return model.to(device)
    with _config_folder(shape) as folder, device:
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def write_random_model(folder: Path, shape: str, device: str) -> None:
    """Files that a server can load: weights, settings, and a tokenizer with a token for a byte."""
    from tokenizers import Tokenizer, models

    load_transformers(torch.device(device), shape).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}), "utf-8")
    letters = {f"<0x{byte:02X}>": byte for byte in range(256)}
    Tokenizer(models.BPE(letters, [], byte_fallback=True)).save(str(folder / "tokenizer.json"))


def _embedded_folder() -> Path:
    return model_folder(EMBEDDED_SOURCE, LocalEngineConfig(device="cpu"))


@contextlib.contextmanager
def _config_folder(shape: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}), "utf-8")
        yield path

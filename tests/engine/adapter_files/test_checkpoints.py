"""Checkpoints come back bit for bit, are refused when damaged or foreign, and `peft` reads them.

Logits are compared with `peft` on a tiny random Llama, float32, to 1e-5.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith import disk
from tinsmith.cli.weights.peft_layout import to_peft
from tinsmith.engine.base import SavedKind
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool, AdapterSegments
from tinsmith.errors import EngineError, TinkerError, ValidationError
from tinsmith.types import LoraConfig

NewAdapter = Callable[..., Adapter]
KINDS: tuple[SavedKind, ...] = ("sampler", "training", "exact")


@pytest.fixture
def trained(tiny_decoder: Decoder, new_adapter: NewAdapter) -> Adapter:
    """An adapter in the middle of training: moments, a step count, a pending gradient."""
    adapter = new_adapter(tiny_decoder)
    generator = torch.Generator().manual_seed(5)
    size = adapter.layout.size
    adapter.exp_avg = torch.randn(size, generator=generator)
    adapter.exp_avg_sq = torch.rand(size, generator=generator)
    adapter.grad = torch.randn(size, generator=generator)
    adapter.step = 7
    return adapter


@pytest.fixture
def fresh(tiny_decoder: Decoder, new_adapter: NewAdapter) -> Adapter:
    """Another adapter of the same shape, with other weights and a state to be overwritten."""
    adapter = new_adapter(tiny_decoder, fill_seed=99)
    adapter.grad = torch.ones(adapter.layout.size)
    adapter.step = 3
    return adapter


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def state(adapter: Adapter) -> tuple[Any, ...]:
    vectors = (adapter.flat, adapter.grad, adapter.exp_avg, adapter.exp_avg_sq)
    return (*(None if v is None else v.clone() for v in vectors), adapter.step)


def assert_untouched(adapter: Adapter, before: tuple[Any, ...]) -> None:
    *vectors, step = state(adapter)
    assert step == before[-1]
    assert all(same(one, other) for one, other in zip(vectors, before[:-1], strict=True))


def test_an_exact_save_restores_everything_bit_for_bit(
    trained: Adapter, fresh: Adapter, tmp_path: Path
) -> None:
    info = checkpoints.save(trained, tmp_path / "c", "exact")
    assert info.step == 7
    assert info.size_bytes == sum(f.stat().st_size for f in (tmp_path / "c").iterdir())
    assert checkpoints.load(fresh, tmp_path / "c", "exact").step == 7
    assert_untouched(fresh, state(trained))


@pytest.mark.parametrize("saved", ["training", "exact"])
def test_a_training_save_restores_weights_and_optimizer(
    trained: Adapter, fresh: Adapter, tmp_path: Path, saved: SavedKind
) -> None:
    checkpoints.save(trained, tmp_path / "c", saved)
    checkpoints.load(fresh, tmp_path / "c", "training")
    assert_untouched(fresh, (trained.flat, None, trained.exp_avg, trained.exp_avg_sq, 7))


@pytest.mark.parametrize("saved", KINDS)
def test_a_sampler_save_restores_weights_and_starts_the_rest_afresh(
    trained: Adapter, fresh: Adapter, tmp_path: Path, saved: SavedKind
) -> None:
    checkpoints.save(trained, tmp_path / "c", saved)
    assert checkpoints.load(fresh, tmp_path / "c", "sampler").step == 0
    assert_untouched(fresh, (trained.flat, None, None, None, 0))


@pytest.mark.parametrize("kind", ["training", "exact"])
def test_a_model_that_never_stepped_can_be_saved_and_restored(
    tiny_decoder: Decoder,
    new_adapter: NewAdapter,
    fresh: Adapter,
    tmp_path: Path,
    kind: SavedKind,
) -> None:
    untrained = new_adapter(tiny_decoder)
    checkpoints.save(untrained, tmp_path / "c", kind)
    checkpoints.load(fresh, tmp_path / "c", kind)
    assert_untouched(fresh, (untrained.flat, None, None, None, 0))


def test_the_files_are_what_each_kind_needs(trained: Adapter, tmp_path: Path) -> None:
    weights = {"adapter_model.safetensors", "adapter_config.json", "tinsmith.json"}
    more = {"sampler": set(), "training": {"optimizer.safetensors"}}
    more["exact"] = more["training"] | {"gradients.safetensors"}
    for kind in KINDS:
        checkpoints.save(trained, tmp_path / kind, kind)
        assert {f.name for f in (tmp_path / kind).iterdir()} == weights | more[kind]


def test_more_than_was_saved_cannot_be_loaded(
    trained: Adapter, fresh: Adapter, tmp_path: Path
) -> None:
    before = state(fresh)
    for saved, wanted, missing in (
        ("sampler", "training", "optimizer state"),
        ("sampler", "exact", "optimizer state"),
        ("training", "exact", "pending gradients"),
    ):
        folder = tmp_path / f"{saved}-{wanted}"
        checkpoints.save(trained, folder, saved)  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match=f"saved as '{saved}': it has no {missing}"):
            checkpoints.load(fresh, folder, wanted)  # type: ignore[arg-type]
    assert_untouched(fresh, before)


def test_an_existing_folder_is_not_overwritten(trained: Adapter, tmp_path: Path) -> None:
    for make in (lambda p: p.mkdir(), lambda p: p.write_text("x"), lambda p: p.symlink_to("gone")):
        target = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
        make(target)
        with pytest.raises(ValidationError, match="exists already"):
            checkpoints.save(trained, target, "sampler")
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".")]


def test_a_failed_save_leaves_nothing_behind(
    trained: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(trained, tmp_path / "c", "exact")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_is_not_taken_for_a_checkpoint_and_can_be_repeated(
    trained: Adapter, fresh: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish_folder", killed)
        patch.setattr(disk, "discard_folder", lambda folder: None)
        with pytest.raises(Killed):
            checkpoints.save(trained, tmp_path / "c", "exact")
    assert not (tmp_path / "c").exists()
    checkpoints.save(trained, tmp_path / "c", "exact")
    checkpoints.load(fresh, tmp_path / "c", "exact")
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_every_file_and_folder_is_synced_before_the_name_appears(
    trained: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        published = (tmp_path / "new" / "c").exists()
        synced.append(f"{path.relative_to(tmp_path)}{' published' if published else ''}")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    checkpoints.save(trained, tmp_path / "new" / "c", "exact")
    draft = "new/.c.draft"
    assert synced == [
        ".",
        f"{draft}/adapter_model.safetensors",
        f"{draft}/adapter_config.json",
        f"{draft}/optimizer.safetensors",
        f"{draft}/gradients.safetensors",
        f"{draft}/tinsmith.json",
        draft,
        "new published",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "gradients.safetensors",
    ],
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    trained: Adapter, fresh: Adapter, tmp_path: Path, name: str, damage: str
) -> None:
    checkpoints.save(trained, tmp_path / "c", "exact")
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    before = state(fresh)
    with pytest.raises(EngineError, match=f"{name} (is missing|of checkpoint 'c' is damaged)"):
        checkpoints.load(fresh, tmp_path / "c", "exact")
    assert_untouched(fresh, before)


def test_a_manifest_that_was_changed_is_refused(
    trained: Adapter, fresh: Adapter, tmp_path: Path
) -> None:
    checkpoints.save(trained, tmp_path / "c", "training")
    path = tmp_path / "c" / "tinsmith.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(EngineError, match="does not match its own checksum"):
        checkpoints.load(fresh, tmp_path / "c", "training")
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValidationError, match="not valid JSON"):
        checkpoints.load(fresh, tmp_path / "c", "training")


def resigned(folder: Path, **changes: Any) -> None:
    """Change a manifest and give it a checksum that fits, as an attacker could."""
    path = folder / "tinsmith.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    content.update(changes)
    body = json.dumps(content, indent=1, sort_keys=True).encode()
    import hashlib

    path.write_text(json.dumps({**content, "sha256": hashlib.sha256(body).hexdigest()}))


def test_a_manifest_cannot_name_files_of_its_own(
    trained: Adapter, fresh: Adapter, tmp_path: Path
) -> None:
    checkpoints.save(trained, tmp_path / "c", "training")
    files = json.loads((tmp_path / "c" / "tinsmith.json").read_text())["files"]
    resigned(tmp_path / "c", files={**files, "../../etc/passwd": {"size": 1, "sha256": "0"}})
    with pytest.raises(ValidationError, match="does not describe a checkpoint"):
        checkpoints.load(fresh, tmp_path / "c", "sampler")


def test_a_later_format_is_refused(trained: Adapter, fresh: Adapter, tmp_path: Path) -> None:
    checkpoints.save(trained, tmp_path / "c", "training")
    resigned(tmp_path / "c", format=2)
    with pytest.raises(ValidationError, match="this version reads 1"):
        checkpoints.load(fresh, tmp_path / "c", "sampler")


def test_a_missing_checkpoint_is_refused_by_name(fresh: Adapter, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no checkpoint called 'gone'"):
        checkpoints.load(fresh, tmp_path / "gone", "sampler")


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"rank": 8}, "rank 4, the model 8"),
        ({"train_attn": False}, "train_attn True, the model False"),
        ({"train_mlp": False}, "train_mlp True, the model False"),
        ({"train_unembed": False}, "train_unembed True, the model False"),
    ],
)
def test_another_shape_is_refused(
    tiny_decoder: Decoder,
    new_adapter: NewAdapter,
    trained: Adapter,
    tmp_path: Path,
    lora: dict[str, Any],
    reason: str,
) -> None:
    checkpoints.save(trained, tmp_path / "c", "exact")
    other = new_adapter(tiny_decoder, **lora)
    before = state(other)
    with pytest.raises(ValidationError, match=reason):
        checkpoints.load(other, tmp_path / "c", "sampler")
    assert_untouched(other, before)


def test_another_base_model_is_refused(trained: Adapter, fresh: Adapter, tmp_path: Path) -> None:
    checkpoints.save(trained, tmp_path / "c", "exact")
    fresh.base_model = "other"
    with pytest.raises(ValidationError, match="of base model 'tiny', the model is of 'other'"):
        checkpoints.load(fresh, tmp_path / "c", "exact")


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 2, "seed": 17},
        {"rank": 3, "train_attn": False},
        {"rank": 3, "train_mlp": False, "train_unembed": False},
    ],
)
def test_the_shape_of_a_checkpoint_can_be_read(
    tiny_decoder: Decoder, new_adapter: NewAdapter, tmp_path: Path, lora: dict[str, Any]
) -> None:
    adapter = new_adapter(tiny_decoder, **lora)
    checkpoints.save(adapter, tmp_path / "c", "sampler")
    assert checkpoints.read_lora(tmp_path / "c", tiny_decoder.config) == adapter.lora


# PEFT


def our_logits(decoder: Decoder, adapter: Adapter | None, tokens: Tensor) -> Tensor:
    segments = AdapterSegments.whole(len(tokens), adapter)
    with torch.no_grad():
        attention = PackedAttention(decoder.config, [len(tokens)])
        hidden = decoder.hidden(tokens, torch.arange(len(tokens)), attention, segments)
        return decoder.unembed(hidden, segments)


TOKENS = torch.tensor([1, 5, 9, 33, 80, 2, 41])


@pytest.mark.parametrize("variant_name", ["llama", "llama_tied", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    "lora", [{}, {"train_unembed": False}, {"rank": 2, "train_attn": False}], ids=str
)
@pytest.mark.filterwarnings("ignore:.*tie.*", "ignore:Model has `tie_word_embeddings=True`")
def test_peft_loads_what_is_made_of_our_checkpoint_with_the_same_logits(
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: NewAdapter,
    tmp_path: Path,
    variant_name: str,
    lora: dict[str, Any],
) -> None:
    from peft import PeftModel

    decoder = Decoder.load(model_folder(variant_name))
    adapter = new_adapter(decoder, **lora)
    checkpoints.save(adapter, tmp_path / "c", "exact")
    to_peft(tmp_path / "c")
    model = PeftModel.from_pretrained(reference_model(variant_name), tmp_path / "c").eval()
    with torch.no_grad():
        theirs = model(TOKENS[None]).logits[0]
    assert (theirs - our_logits(decoder, None, TOKENS)).abs().max() > 0.01
    torch.testing.assert_close(our_logits(decoder, adapter, TOKENS), theirs, atol=1e-5, rtol=1e-5)


def peft_adapter(model: Any, folder: Path, **settings: Any) -> Tensor:
    """Save an adapter made by `peft` with random B; returns its logits."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
    torch.manual_seed(3)
    peft_model = get_peft_model(model, PeftLoraConfig(**{**defaults, **settings})).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        logits: Tensor = peft_model(TOKENS[None]).logits[0]
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    return logits


def load_foreign(decoder: Decoder, folder: Path) -> Adapter:
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    adapter = pool.create_empty("tiny", checkpoints.read_lora(folder, decoder.config))
    adapter.flat.fill_(torch.nan)  # memory as it may be found
    checkpoints.load(adapter, folder, "sampler")
    return adapter


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ALL},
        {"target_modules": [*ALL, "lm_head"]},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["down_proj"], "lora_alpha": 8},
        {"target_modules": ALL, "r": 7, "lora_alpha": 13},
        {"target_modules": ALL, "layers_to_transform": [1]},
        {"target_modules": ALL, "init_lora_weights": "gaussian"},
        {"target_modules": ALL, "use_rslora": True},
        {"target_modules": ALL, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3}},
        {"target_modules": ALL, "alpha_pattern": {"1.self_attn.q_proj": 5, "self_attn.q_proj": 9}},
        {
            "target_modules": [*ALL, "lm_head"],
            "use_rslora": True,
            "rank_pattern": {"model.layers.0.self_attn.v_proj": 1, "lm_head": 2},
            "alpha_pattern": {"v_proj": 0.5, "lm_head": 64},
        },
    ],
    ids=str,
)
def test_we_load_adapters_made_by_peft_with_the_same_logits(
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    theirs = peft_adapter(reference_model("llama"), tmp_path, **settings)
    adapter = load_foreign(tiny_decoder, tmp_path)
    assert adapter.rank == settings.get("r", 4)
    ours = our_logits(tiny_decoder, adapter, TOKENS)
    assert (ours - our_logits(tiny_decoder, None, TOKENS)).abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_modules_that_a_foreign_adapter_leaves_alone_can_still_learn(
    tiny_decoder: Decoder, reference_model: Callable[[str], Any], tmp_path: Path
) -> None:
    peft_adapter(reference_model("llama"), tmp_path, target_modules=["q_proj"])
    named = dict(load_foreign(tiny_decoder, tmp_path).named_tensors())
    module = "base_model.model.model.layers.0.self_attn.k_proj"
    assert named[f"{module}.lora_A.weight"].abs().sum() > 0
    assert named[f"{module}.lora_B.weight"].abs().sum() == 0


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern.q_proj"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"target_parameters": ["up_proj.weight", "experts.up_proj"]}, "target_parameters"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"r": 0}, "r"),
        ({"r": "4"}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    tmp_path: Path,
    settings: dict[str, Any],
    path: str,
) -> None:
    peft_adapter(reference_model("llama"), tmp_path, target_modules=ALL)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    with pytest.raises(ValidationError) as caught:
        load_foreign(tiny_decoder, tmp_path)
    assert caught.value.path == f"adapter_config.json.{path}"


def changed_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(A_NAME), "is missing"),
        (lambda t: t.update({A_NAME: torch.zeros(4, 31)}), "shape"),
        (lambda t: t.update({A_NAME: torch.full((4, 32), torch.nan)}), "not finite"),
        (
            lambda t: t.update({"base_model.model.x.weight": torch.zeros(1)}),
            "save_embedding_layers",
        ),
        (
            lambda t: t.update({A_NAME.replace("layers.0", "layers.9"): torch.zeros(4, 32)}),
            "no place",
        ),
        (lambda t: t.update({A_NAME: torch.zeros(5, 32)}), r"rank 4\) want \[4, 32\]"),
        (lambda t: t.update({A_NAME: t[A_NAME].double()}), "is F64; known: F32, F16, BF16"),
        (lambda t: t.update({A_NAME: t[A_NAME].to(torch.int8)}), "is I8; known"),
        (
            lambda t: t.update({A_NAME.replace(".layers", ".language_model.layers"): t[A_NAME]}),
            "is not expected: another tensor has its place",
        ),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A_NAME]}),
            "adapters of the embedding are not supported",
        ),
    ],
    ids=[
        *("missing", "shape", "nan", "embedding", "layer", "rank", "float64", "int8", "twice"),
        "embedding adapter",
    ],
)
def test_a_foreign_adapter_that_does_not_fit_is_refused(
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None],
    reason: str,
) -> None:
    peft_adapter(reference_model("llama"), tmp_path, target_modules=ALL)
    changed_weights(tmp_path, change)
    with pytest.raises(ValidationError, match=reason):
        load_foreign(tiny_decoder, tmp_path)


def test_a_foreign_adapter_has_no_training_state(
    fresh: Adapter, reference_model: Callable[[str], Any], tmp_path: Path
) -> None:
    peft_adapter(reference_model("llama"), tmp_path, target_modules=ALL)
    with pytest.raises(ValidationError, match="weights only"):
        checkpoints.load(fresh, tmp_path, "training")


def test_a_folder_of_something_else_is_refused(fresh: Adapter, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"adapter_config\.json: there is no such file"):
        checkpoints.load(fresh, tmp_path, "sampler")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValidationError, match="must hold a JSON object"):
        checkpoints.load(fresh, tmp_path, "sampler")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 32})
    )
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValidationError, match="other formats"):
        checkpoints.load(fresh, tmp_path, "sampler")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(TinkerError, match="not a safetensors file"):
        checkpoints.load(fresh, tmp_path, "sampler")


def test_a_sampler_save_does_not_follow_the_model(
    trained: Adapter, fresh: Adapter, tmp_path: Path
) -> None:
    saved = trained.flat.clone()
    checkpoints.save(trained, tmp_path / "c", "sampler")
    trained.flat.add_(1.0)
    checkpoints.load(fresh, tmp_path / "c", "sampler")
    assert torch.equal(fresh.flat, saved)


def test_a_restored_adapter_is_seen_by_whoever_holds_a_rounded_copy(
    model_folder: Callable[[str], Path], trained: Adapter, tmp_path: Path
) -> None:
    checkpoints.save(trained, tmp_path / "c", "sampler")
    decoder = Decoder.load(model_folder("llama"))
    pool = AdapterPool(decoder.config, decoder.device, torch.bfloat16)
    adapter = pool.create("tiny", LoraConfig(rank=4, seed=1))
    before = next(iter(adapter.weights().values())).a.clone()
    checkpoints.load(adapter, tmp_path / "c", "sampler")
    after = next(iter(adapter.weights().values())).a
    assert not torch.equal(before, after)

"""Layers of experts: rows in tiles, the router's gradient, and nothing that waits for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.engine.model.test_models import models_of
from tests.engine.train.training_reference import RAGGED, succeed
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import TINY_TEXT_PARTS, save_tiny_vision
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.experts.grouped_router import GroupedRouter
from tinsmith.engine.local.model.experts.router import Router
from tinsmith.engine.local.model.experts.routing import Routing, TokenAdapters
from tinsmith.engine.local.model.families import DecoderConfig, ExpertGroups
from tinsmith.engine.local.model.foreign.config import is_foreign
from tinsmith.engine.local.model.foreign.describing import read_foreign_config
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.model.verifying import verification
from tinsmith.errors import EngineError
from tinsmith.types import LoraConfig

NUM_EXPERTS = 5


def choices_of(num_tokens: int, seed: int = 0, per_token: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # The last expert is nobody's choice.
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    return scores.topk(per_token).indices


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("adapters", [None, [-1], [4, -1, 2], [0, 1, 0]])
def test_tiles_cover_every_row_once_and_never_mix_experts_or_owners(
    num_tokens: int, adapters: list[int] | None
) -> None:
    routing = Routing(choices_of(num_tokens), NUM_EXPERTS)
    owners = None
    of_token = torch.zeros(num_tokens, dtype=torch.int64)
    if adapters is not None:
        runs = len(adapters)
        of_token = torch.tensor([adapters[n * runs // num_tokens] for n in range(num_tokens)])
        owners = TokenAdapters(of_token, runs)
    tiles = routing.tiles(4, owners)
    covered: list[int] = []
    for first, count in tiles.table.t().tolist():
        rows = range(first, first + count)
        covered += rows
        assert len(rows) <= 4
        owned = {(int(routing.experts[r]), int(of_token[routing.tokens[r]])) for r in rows}
        assert len(owned) <= 1
    assert sorted(covered) == list(range(2 * num_tokens))


def test_rows_go_to_the_chosen_experts_and_back_to_their_tokens() -> None:
    choices = choices_of(7)
    routing = Routing(choices, NUM_EXPERTS)
    assert torch.equal(routing.restored(routing.experts), choices)
    assert torch.equal(routing.restored(routing.tokens)[:, 0], torch.arange(7))
    assert torch.equal(routing.of_choices(choices), routing.experts)
    x, shares = torch.randn(7, 3), torch.rand(7, 2)
    torch.testing.assert_close(routing.sums(routing.expanded(x)), 2 * x)
    weighed = routing.weighed_sums(routing.expanded(x), shares)
    torch.testing.assert_close(weighed, x * shares.sum(dim=1, keepdim=True))
    counts = choices.flatten().bincount(minlength=NUM_EXPERTS)
    assert routing.offsets.tolist() == counts.cumsum(0).tolist()
    is_early = (choices < NUM_EXPERTS) & (torch.arange(7) < 4)[:, None]
    early = choices[is_early].bincount(minlength=NUM_EXPERTS)
    firsts, middles, _ = routing.edges(torch.tensor([0, 4, 7])).t()
    assert (middles - firsts).tolist() == early.tolist()


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_gradient_of_shares_is_that_of_autograd(is_normalized: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    router = Router(torch.randn(NUM_EXPERTS, 8), 3, is_normalized)
    routed = router.forward(x)
    if is_normalized:
        torch.testing.assert_close(routed.shares.sum(dim=1), torch.ones(6))
    grad = torch.randn(6, 3)
    (expected,) = torch.autograd.grad(routed.shares, x, grad)
    with torch.no_grad():
        torch.testing.assert_close(router.backward(grad, routed), expected)


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors that have shapes only: whoever asks for a number is refused."""
    with FakeTensorMode(), torch.no_grad():
        yield


def test_nothing_of_a_decoding_step_depends_on_what_the_router_chooses() -> None:
    """So that a graph of it can be captured: the number of rows and tiles is known before."""
    with without_data():
        x, adapters = torch.randn(6, 8), torch.zeros(6, dtype=torch.int64)
        groups = ExpertGroups(count=2, per_token=1, scale=2.5)
        grouped = GroupedRouter(torch.randn(6, 8), torch.randn(6), 2, True, groups).forward(x)
        assert grouped.choices.shape == grouped.shares.shape == (6, 2)
        _, choices, shares = Router(torch.randn(NUM_EXPERTS, 8), 2, True).forward(x)
        routing = Routing(choices, NUM_EXPERTS)
        assert routing.expanded(x).shape == (12, 8)
        assert routing.weighed_sums(routing.expanded(x), shares).shape == x.shape
        assert routing.offsets.shape == (NUM_EXPERTS,)
        assert routing.edges(torch.zeros(3, dtype=torch.int64)).shape == (NUM_EXPERTS, 3)
        assert routing.tiles(4).table.shape == (2, 8)
        assert routing.tiles(4, TokenAdapters(adapters, 6)).table.shape == (2, 12)
        with pytest.raises(DataDependentOutputException):
            routing.host_edges((6,))


def initial(config: DecoderConfig, lora: LoraConfig) -> dict[str, Tensor]:
    pool = AdapterPool(config, torch.device("cpu"), torch.float32)
    return dict(pool.create("tiny", lora).named_tensors())


OURS = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")
"""Families with experts that our own decoder runs."""


ONCE_FOREIGN = (
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v3",
    "deepseek_v3, dense",
    "deepseek_v3, whole queries",
    "kimi_k2",
)
"""Families that ran through `transformers`' modules in earlier releases: models are rebuilt from
their creation on."""


@pytest.mark.parametrize("model_type", list(dict.fromkeys([*OURS, *ONCE_FOREIGN])))
def test_an_adapter_has_the_names_and_first_numbers_that_it_has_through_transformers_modules(
    model_type: str, tmp_path: Path
) -> None:
    """As the model runs on several ranks."""
    save = save_tiny_vision if model_type in TINY_TEXT_PARTS else save_tiny
    save(model_type, tmp_path)
    ours = models_of({"tiny": tmp_path}).config("tiny")
    theirs = read_foreign_config(tmp_path, UnsupportedModelError("to compare"))
    lora = LoraConfig(rank=3, seed=5)
    found, expected = initial(ours, lora), initial(theirs, lora)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", OURS)
def test_experts_are_divided_among_ranks_and_refused_where_bits_must_not_change(
    model_type: str, tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path)
    config = LocalEngineConfig(device="cpu", models={"tiny": str(tmp_path)}, verify_models=False)
    assert BaseModels(config).config("tiny").experts is not None
    assert BaseModels(replace(config, ranks=2)).config("tiny").experts is None
    with pytest.raises(EngineError, match=r"exact.*experts"):
        BaseModels(replace(config, on_policy="exact")).config("tiny")


def test_a_model_with_bounds_that_our_decoder_does_not_know_runs_through_transformers(
    tmp_path: Path,
) -> None:
    save_tiny("olmoe", tmp_path, clip_qkv=0.5)
    assert is_foreign(models_of({"tiny": tmp_path}).get("tiny").config)


MANY: dict[str, Any] = {"num_experts": 12, "num_hidden_layers": 3, "mlp_only_layers": [0]}


def test_few_experts_of_a_model_are_compared(tmp_path: Path) -> None:
    """With a plain layer beside; nobody looks at the weights of the others."""
    save_tiny("qwen3_moe", tmp_path, **MANY)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts.8." in name or ".layers.2." in name]:
        tensors[name].fill_(torch.nan)
    save_file(tensors, path, {"format": "pt"})
    assert verification.compare(tmp_path, read_config(tmp_path)) <= verification.TOLERANCE


def test_shares_that_are_read_otherwise_than_transformers_reads_them_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3_moe", tmp_path, **MANY)
    forward = Router.forward
    monkeypatch.setattr(
        Router, "forward", lambda self, *args: forward(replace(self, is_normalized=False), *args)
    )
    difference = verification.compare(tmp_path, read_config(tmp_path))
    assert difference > 100 * verification.TOLERANCE


def test_layers_are_computed_again_with_the_same_gradient(
    tmp_path: Path, new_adapter: Callable[..., Adapter]
) -> None:
    save_tiny("qwen3_moe", tmp_path)
    decoder = models_of({"tiny": tmp_path}).get("tiny")
    found = []
    for checkpointing in (False, True):
        adapter = new_adapter(decoder)
        config = LocalEngineConfig(device="cpu", checkpoint_layers=checkpointing)
        succeed(decoder, RAGGED, adapter, config)
        found.append(adapter.grad)
    assert torch.equal(*found)

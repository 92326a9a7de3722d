"""Bad input is refused before anything is computed, with a path to datum, field and position."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from tinsmith.engine.base import CustomLoss, Pass, SampleJob
from tinsmith.engine.checks import (
    MAX_SAMPLES,
    MAX_TARGETS,
    check_lora,
    check_pass,
    check_sample,
)
from tinsmith.errors import ValidationError
from tinsmith.types import (
    CustomLossGraph,
    CustomLossInput,
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    SamplingParams,
    TensorData,
)

LIMITS = {"vocab_size": 100, "max_context_length": 8}


def floats(*values: float) -> TensorData:
    return TensorData(data=list(values), dtype="float32", shape=[len(values)])


def ints(*values: int) -> TensorData:
    return TensorData(data=list(values), dtype="int64", shape=[len(values)])


def datum(tokens: list[int] | None = None, **inputs: TensorData) -> Datum:
    model_input = ModelInput.from_ints([1, 2, 3] if tokens is None else tokens)
    return Datum(model_input=model_input, loss_fn_inputs={"target_tokens": ints(2, 3, 4), **inputs})


def request(*data: Datum, loss_fn: str = "cross_entropy", **config: Any) -> Pass:
    return Pass(adapter_id="a", data=list(data), loss_fn=loss_fn, loss_fn_config=config)


GOOD = datum(weights=floats(0, 1, 1))
POLICY = {"logprobs": floats(-1, -1, -1), "advantages": floats(0, 1, -1)}


def refused(bad: Pass, path: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        check_pass(bad, **LIMITS)
    assert caught.value.path == path


def refused_datum(bad: Datum, path: str, reason: str, loss_fn: str = "cross_entropy") -> None:
    good = GOOD if loss_fn == "cross_entropy" else policy_datum(loss_fn)
    dot = "" if path.startswith("[") else "."
    refused(request(good, good, bad, loss_fn=loss_fn), f"data[2]{dot}{path}", reason)


def policy_datum(loss_fn: str, **changes: TensorData) -> Datum:
    extra = {"sequence_ratio_mask": floats(0, 1, 1)} if loss_fn == "gspo" else {}
    return datum(**{**POLICY, **extra, **changes})


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_well_formed_policy_data_pass(loss_fn: str) -> None:
    check_pass(request(policy_datum(loss_fn), loss_fn=loss_fn), **LIMITS)


def test_well_formed_cross_entropy_data_pass() -> None:
    wide = TensorData(data=np.zeros((3, 4)), dtype="float32", shape=[3, 4])
    targets = TensorData(data=np.arange(12).reshape(3, 4), dtype="int64", shape=[3, 4])
    sparse = TensorData(
        data=[5, 7],
        dtype="int64",
        shape=[3, 4],
        sparse_crow_indices=[0, 1, 1, 2],
        sparse_col_indices=[3, 0],
    )
    check_pass(
        request(
            GOOD,
            datum(),
            datum(target_tokens=targets, weights=wide),
            datum(target_tokens=sparse, weights=wide),
            datum(target_tokens=targets),
            datum([99] * 8, target_tokens=ints(*[0] * 8)),
        ),
        **LIMITS,
    )


def test_a_token_outside_the_vocabulary_is_named_with_its_position() -> None:
    for token in (100, 5000, -1):
        refused_datum(datum([1, token, 3]), "model_input[1]", f"token {token} is outside")
        bad = datum(target_tokens=ints(2, 3, token))
        refused_datum(bad, "loss_fn_inputs.target_tokens[2]", f"token {token} is outside")


def test_a_token_outside_the_vocabulary_is_found_among_several_targets() -> None:
    targets = np.zeros((3, 4), dtype=np.int64)
    targets[1, 2] = 100
    bad = datum(target_tokens=TensorData(data=targets, dtype="int64", shape=[3, 4]))
    refused_datum(bad, "loss_fn_inputs.target_tokens[1, 2]", "token 100")
    sparse = TensorData(
        data=[5, 100],
        dtype="int64",
        shape=[3, 4],
        sparse_crow_indices=[0, 1, 1, 2],
        sparse_col_indices=[3, 0],
    )
    refused_datum(datum(target_tokens=sparse), "loss_fn_inputs.target_tokens.data[1]", "token 100")


def test_an_empty_sequence_is_refused() -> None:
    refused_datum(datum([]), "model_input", "no tokens")
    empty = Datum(model_input=ModelInput.empty(), loss_fn_inputs={"target_tokens": ints()})
    refused_datum(empty, "model_input", "no tokens")


def test_no_data_is_refused() -> None:
    refused(request(), "data", "at least one")


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    bad = datum([1] * 9, target_tokens=ints(*[1] * 9))
    refused_datum(bad, "model_input", "9 tokens; the model's context holds 8")


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        (ImageChunk(data=b"x", format="png", expected_tokens=3), "image"),
        (
            ImageAssetPointerChunk(location="x", format="png", expected_tokens=3),
            "image_asset_pointer",
        ),
        (DmelChunk(dmel=b"\x00\x01\x03"), "dmel"),
    ],
)
def test_a_chunk_that_is_not_text_is_refused_on_a_text_model(chunk: Any, kind: str) -> None:
    mixed = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), chunk])
    bad = Datum(model_input=mixed, loss_fn_inputs={"target_tokens": ints(1, 2, 3, 4)})
    refused_datum(bad, "model_input.chunks[1]", f"{kind!r} cannot be used")
    with pytest.raises(ValidationError) as caught:
        check_sample(job(prompt=mixed), **LIMITS)
    assert caught.value.path == "prompt.chunks[1]"


def test_lengths_that_differ_are_refused() -> None:
    refused_datum(
        datum(target_tokens=ints(1, 2)),
        "loss_fn_inputs.target_tokens",
        "2 positions and model_input has 3",
    )
    refused_datum(
        datum(weights=floats(1, 1)),
        "loss_fn_inputs.weights",
        r"has shape \[2\], target_tokens \[3\]",
    )
    for name in ("logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"):
        refused_datum(
            policy_datum("ppo", **{name: floats(1, 1, 1, 1)}),
            f"loss_fn_inputs.{name}",
            r"has shape \[4\]",
            loss_fn="ppo",
        )
    refused_datum(
        policy_datum("gspo", sequence_ratio_mask=floats(1)),
        "loss_fn_inputs.sequence_ratio_mask",
        r"has shape \[1\]",
        loss_fn="gspo",
    )


def test_a_wrong_dtype_is_refused() -> None:
    refused_datum(
        datum(target_tokens=floats(1, 2, 3)),
        "loss_fn_inputs.target_tokens",
        "must be int64, got float32",
    )
    refused_datum(
        datum(weights=ints(1, 1, 1)), "loss_fn_inputs.weights", "must be float32, got int64"
    )


def test_a_wrong_rank_is_refused() -> None:
    def cube(dtype: str, *shape: int) -> TensorData:
        return TensorData(data=np.zeros(shape, dtype=dtype), dtype=dtype, shape=shape)  # type: ignore[arg-type]

    refused_datum(
        datum(target_tokens=cube("int64", 3, 1, 1)), "loss_fn_inputs.target_tokens", "rank 1 or 2"
    )
    refused_datum(datum(target_tokens=cube("int64")), "loss_fn_inputs.target_tokens", "rank 1 or 2")
    refused_datum(datum(weights=cube("float32", 3, 1)), "loss_fn_inputs.weights", "rank 1")
    refused_datum(
        policy_datum("ppo", target_tokens=cube("int64", 3, 2)),
        "loss_fn_inputs.target_tokens",
        "one target for each position",
        loss_fn="ppo",
    )


def test_too_many_targets_are_refused_before_they_take_memory() -> None:
    columns = MAX_TARGETS // 3 + 1
    huge = TensorData(
        data=[1],
        dtype="int64",
        shape=[3, columns],
        sparse_crow_indices=[0, 1, 1, 1],
        sparse_col_indices=[columns - 1],
    )
    refused_datum(datum(target_tokens=huge), "loss_fn_inputs.target_tokens", "cells")


def test_a_missing_input_is_refused() -> None:
    without = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={})
    refused_datum(without, "loss_fn_inputs.target_tokens", "every loss needs this input")
    for name in ("logprobs", "advantages"):
        inputs = {key: value for key, value in POLICY.items() if key != name}
        refused(
            request(datum(**inputs), loss_fn="dro"), f"data[0].loss_fn_inputs.{name}", "dro needs"
        )
    refused(
        request(datum(**POLICY), loss_fn="gspo"),
        "data[0].loss_fn_inputs.sequence_ratio_mask",
        "gspo needs",
    )


def test_an_unknown_input_is_refused() -> None:
    refused_datum(
        datum(advantages=floats(1, 1, 1)),
        "loss_fn_inputs.advantages",
        "reads: target_tokens, weights",
    )
    refused_datum(datum(mask=floats(1, 1, 1)), "loss_fn_inputs.mask", "reads no such input")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_position(bad: float) -> None:
    refused_datum(datum(weights=floats(1, bad, bad)), "loss_fn_inputs.weights[1]", "must be finite")
    for name in ("logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"):
        refused_datum(
            policy_datum("ppo", **{name: floats(1, 1, bad)}),
            f"loss_fn_inputs.{name}[2]",
            "must be finite",
            loss_fn="ppo",
        )


def test_large_numbers_are_finite() -> None:
    check_pass(request(datum(weights=floats(3e38, -3e38, 0))), **LIMITS)


def test_unknown_losses_are_refused_with_the_known_ones() -> None:
    refused(request(GOOD, loss_fn="grpo"), "loss_fn", "known losses: cross_entropy")
    refused(request(GOOD, loss_fn="stable_reinforce"), "loss_fn", "formula is not public")


def test_config_is_checked() -> None:
    ppo = policy_datum("ppo")
    check_pass(request(ppo, loss_fn="ppo", clip_low_threshold=0.9, clip_high_threshold=2), **LIMITS)
    refused(request(GOOD, beta=1.0), "loss_fn_config.beta", "known: none")
    refused(request(ppo, loss_fn="ppo", clip=0.2), "loss_fn_config.clip", "clip_low_threshold")
    for value in ("0.8", True, None):
        bad = request(ppo, loss_fn="ppo", clip_low_threshold=value)
        refused(bad, "loss_fn_config.clip_low_threshold", "must be a number")
    bad = request(ppo, loss_fn="ppo", clip_low_threshold=math.nan)
    refused(bad, "loss_fn_config.clip_low_threshold", "finite")
    bad = request(ppo, loss_fn="ppo", clip_low_threshold=1.3)
    refused(bad, "data[0].loss_fn_config", "above its clip_high")


def test_crossed_clip_thresholds_are_found_per_token() -> None:
    bad = policy_datum("ppo", clip_low_threshold=floats(0.5, 1.3, 0.5))
    refused_datum(bad, "loss_fn_inputs", "at position 1", loss_fn="ppo")


def test_a_sequence_mask_must_select_tokens() -> None:
    path = "loss_fn_inputs.sequence_ratio_mask"
    bad = policy_datum("gspo", sequence_ratio_mask=floats(0, 0.5, 1))
    refused_datum(bad, f"{path}[1]", "0 or 1, got 0.5", loss_fn="gspo")
    none = policy_datum("gspo", sequence_ratio_mask=floats(0, 0, 0))
    refused_datum(none, path, "selects no token", loss_fn="gspo")


# Custom losses


def custom_request(*data: Datum, **config: Any) -> Pass:
    inputs = [("logprobs", 1), ("advantages", 1), ("scale", 0), ("table", 2)]
    loss = CustomLoss(
        inputs=tuple(CustomLossInput(name=n, rank=r) for n, r in inputs),  # type: ignore[arg-type]
        graph=CustomLossGraph(nodes=[]),
    )
    return Pass(
        adapter_id="a", data=list(data), loss_fn="custom", loss_fn_config=config, custom_loss=loss
    )


TABLE = TensorData(data=np.zeros((3, 2)), dtype="float32", shape=[3, 2])
SCALE = TensorData(data=np.array(2, dtype=np.float32), dtype="float32", shape=[])


def custom_datum(**changes: TensorData) -> Datum:
    return datum(**{"advantages": floats(1, 1, 1), "scale": SCALE, "table": TABLE, **changes})


def test_custom_inputs_must_be_as_declared() -> None:
    check_pass(custom_request(custom_datum(), loss_id="l"), **LIMITS)
    check_pass(custom_request(custom_datum(unread=floats(1)), loss_id="l"), **LIMITS)
    check_pass(custom_request(custom_datum(table=TensorData.from_numpy(np.eye(3)))), **LIMITS)
    path = "data[0].loss_fn_inputs."
    missing = datum(advantages=floats(1, 1, 1), scale=SCALE)
    refused(custom_request(missing), path + "table", "reads this input")
    refused(custom_request(custom_datum(scale=floats(1))), path + "scale", "rank 0")
    refused(custom_request(custom_datum(table=floats(1))), path + "table", "rank 2")
    wide = TensorData(data=np.ones((3, 2), dtype=np.int64), dtype="int64", shape=[3, 2])
    refused(custom_request(custom_datum(target_tokens=wide)), path + "target_tokens", "rank 1")
    nan = custom_datum(advantages=floats(1, 1, math.nan))
    refused(custom_request(nan), path + "advantages[2]", "finite")


def test_custom_config_and_graph_are_checked() -> None:
    refused(custom_request(custom_datum(), beta=1.0), "loss_fn_config.beta", "known: loss_id")
    refused(request(GOOD, loss_fn="custom", loss_id="l"), "loss_fn_config.loss_id", "without")


# Adapters


@pytest.mark.parametrize(
    ("lora", "path"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -1}, "rank"),
        ({"rank": 65}, "rank"),
        ({"rank": 8, "seed": -1}, "seed"),
        ({"rank": 8, "seed": 2**63}, "seed"),
        ({"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False}, ""),
    ],
)
def test_an_impossible_adapter_is_refused(lora: dict[str, Any], path: str) -> None:
    check_lora(LoraConfig(rank=64, seed=2**63 - 1), max_rank=64)
    with pytest.raises(ValidationError) as caught:
        check_lora(LoraConfig(**lora), max_rank=64)
    assert caught.value.path == path


# Sampling


def job(**changes: Any) -> SampleJob:
    fields: dict[str, Any] = {"prompt": ModelInput.from_ints([1, 2, 3]), "params": SamplingParams()}
    return SampleJob(job_id="j", base_model="tiny", weights_id=None, **{**fields, **changes})


def targets(*rows: list[int]) -> TensorData:
    return TensorData(
        data=np.array(rows, dtype=np.int64), dtype="int64", shape=[len(rows), len(rows[0])]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_samples": 16},
        {"prompt": ModelInput.from_ints([1] * 8)},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"topk_prompt_logprobs": 5, "topk_sample_logprobs": 100, "prompt_alt_tokens_k": 200},
        {"target_prompt_logprobs": targets([1, -1], [99, 0])},
        {
            "target_prompt_logprobs": TensorData(
                data=[7],
                dtype="int64",
                shape=[2, 50],
                sparse_crow_indices=[0, 0, 1],
                sparse_col_indices=[49],
            )
        },
        {"params": SamplingParams(max_tokens=10**6, temperature=0, top_k=1, top_p=0.1, seed=-5)},
        {"params": SamplingParams(stop=[])},
        {"params": SamplingParams(stop="\n")},
        {"params": SamplingParams(stop=["a", "b"])},
        {"params": SamplingParams(stop=[0, 99])},
    ],
)
def test_a_sensible_sampling_request_passes(changes: dict[str, Any]) -> None:
    check_sample(job(**changes), **LIMITS)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"prompt": ModelInput.empty()}, "prompt"),
        ({"prompt": ModelInput.from_ints([1] * 9)}, "prompt"),
        ({"prompt": ModelInput.from_ints([1, 2, 100])}, "prompt[2]"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": MAX_SAMPLES + 1}, "num_samples"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 101}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": targets([1], [1], [1])}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": ints(1, 2)}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": targets([1, 2], [1, 100])}, "target_prompt_logprobs[1, 1]"),
        ({"target_prompt_logprobs": targets([1, -2], [1, 1])}, "target_prompt_logprobs[0, 1]"),
        (
            {"target_prompt_logprobs": TensorData.from_numpy(np.zeros((2, 1)))},
            "target_prompt_logprobs",
        ),
        ({"params": SamplingParams(max_tokens=-1)}, "sampling_params.max_tokens"),
        ({"params": SamplingParams(temperature=-0.1)}, "sampling_params.temperature"),
        ({"params": SamplingParams(temperature=math.nan)}, "sampling_params.temperature"),
        ({"params": SamplingParams(temperature=math.inf)}, "sampling_params.temperature"),
        ({"params": SamplingParams(top_k=0)}, "sampling_params.top_k"),
        ({"params": SamplingParams(top_k=-2)}, "sampling_params.top_k"),
        ({"params": SamplingParams(top_p=0)}, "sampling_params.top_p"),
        ({"params": SamplingParams(top_p=1.01)}, "sampling_params.top_p"),
        ({"params": SamplingParams(top_p=math.nan)}, "sampling_params.top_p"),
        ({"params": SamplingParams(stop="")}, "sampling_params.stop[0]"),
        ({"params": SamplingParams(stop=["a", ""])}, "sampling_params.stop[1]"),
        ({"params": SamplingParams(stop=[1, 100])}, "sampling_params.stop[1]"),
        ({"params": SamplingParams(stop=[-1])}, "sampling_params.stop[0]"),
    ],
)
def test_a_sampling_request_that_cannot_be_done_is_refused(
    changes: dict[str, Any], path: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        check_sample(job(**changes), **LIMITS)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"topk_sample_logprobs": 20, "num_samples": 100, "max_tokens": 32_768}, None),
        ({"topk_sample_logprobs": 1024, "num_samples": 4096, "max_tokens": 16}, None),
        ({"topk_sample_logprobs": 1024, "num_samples": 4096}, "topk_sample_logprobs"),
        (
            {"topk_sample_logprobs": 1024, "num_samples": 4096, "max_tokens": 17},
            "topk_sample_logprobs",
        ),
        ({"topk_prompt_logprobs": 1024, "prompt_alt_tokens_k": 1024}, "topk_prompt_logprobs"),
    ],
)
def test_an_answer_that_may_not_fit_into_memory_is_refused(
    fields: dict[str, Any], path: str | None
) -> None:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", None))
    prompt = ModelInput.from_ints(np.ones(60_000, np.int32))
    asked = job(prompt=prompt, params=params, **fields)
    if path is None:
        check_sample(asked, vocab_size=2000, max_context_length=131_072)
        return
    with pytest.raises(ValidationError, match="set max_tokens") as caught:
        check_sample(asked, vocab_size=2000, max_context_length=131_072)
    assert caught.value.path == path


def test_checking_a_large_batch_is_quick() -> None:
    n = 4096
    numbers = TensorData.from_numpy(np.ones(n, dtype=np.float32))
    tokens = np.arange(n, dtype=np.int32)
    one = Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": TensorData.from_numpy(tokens),
            "logprobs": numbers,
            "advantages": numbers,
        },
    )
    start = time.thread_time()
    check_pass(request(*[one] * 256, loss_fn="ppo"), vocab_size=50_000, max_context_length=n)
    assert time.thread_time() - start < 1.0, "about a million tokens; 0.02 s when measured"

"""Custom losses: any function of the log-probabilities that torch can differentiate.

Two ways to run one. Locally, in two passes: the forward pass gives the log-probabilities, the
user's function and its gradient are computed here, and the gradient goes back as the weights of a
cross-entropy pass, which has that gradient. Or on the service: the function is traced into a graph
once and uploaded, where the service can run it.

torch is needed for both and is imported only when a custom loss is used.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate

from tinsmith.client.calls import chunking
from tinsmith.errors import ValidationError
from tinsmith.types import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
    Datum,
    ForwardBackwardOutput,
    TensorData,
)
from tinsmith.types.protocol import MAX_LOSS_INPUTS

if TYPE_CHECKING:
    import torch
    import torch.fx

PerDatumLossFn = Callable[
    Concatenate["torch.Tensor", ...], tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
]
"""(logprobs, *the loss_fn_inputs it reads) -> (scalar loss, metrics `custom/<name>:sum|mean`)."""

CustomLossFn = Callable[[list[Datum], list[Any]], tuple[Any, dict[str, float]]]
"""(data, logprobs of each datum) -> (scalar loss, metrics)."""

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MODULES = frozenset({"torch", "math", "operator", "_operator"})
_LEAVES_TORCH = frozenset({"item", "numpy", "tolist"})


@dataclass(frozen=True)
class LossHandle:
    """A traced per-datum loss, from `ServiceClient.create_custom_loss`."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """`logprobs`, then the keys of `loss_fn_inputs` it reads, in the order it takes them."""
    session_id: str
    """Only clients of this session can use it."""
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    """What runs: the trace, not the original function."""
    loss_id: str | None = None
    """The service's name for it; None: it runs here."""

    @property
    def key(self) -> str:
        """Equal for equal traces."""
        return hashlib.sha256(f"{self.graph.code}{self.inputs!r}".encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs[1:])


# --- The local path ---------------------------------------------------------------------------


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """What the first pass needs: targets, and weights because cross-entropy requires them."""
    return [
        _with_inputs(datum, _targets(datum, index), datum.loss_fn_inputs.get("weights"))
        for index, datum in enumerate(chunking.checked(data))
    ]


def gradients(
    data: Sequence[Datum], output: ForwardBackwardOutput, loss_fn: CustomLossFn | LossHandle
) -> tuple[list[Datum], float, dict[str, float]]:
    """Run the user's function: the data of the second pass, the loss, and the user's metrics."""
    torch = import_torch("run a custom loss")
    logprobs = []
    for index, each in enumerate(output.loss_fn_outputs):
        if "logprobs" not in each:
            raise ValidationError("the service returned no logprobs", f"loss_fn_outputs[{index}]")
        values = each["logprobs"].to_torch().clone()
        logprobs.append(values.requires_grad_(True))
    if len(logprobs) != len(data):
        raise ValidationError(f"{len(logprobs)} outputs came back for {len(data)} datums")
    if isinstance(loss_fn, LossHandle):
        loss, metrics = run_handle(loss_fn, data, logprobs)
    else:
        loss, metrics = loss_fn(list(data), logprobs)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise ValueError(
            "the custom loss must return a tensor computed from the logprobs it was given; "
            f"got {type(loss).__name__} without a gradient"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the custom loss must return one number, got shape {tuple(loss.shape)}; "
            "sum or average it"
        )
    loss.sum().backward()
    second = []
    for index, (datum, values) in enumerate(zip(data, logprobs, strict=True)):
        if values.grad is None:
            raise ValueError(
                f"the custom loss does not depend on the logprobs of data[{index}]; leave the "
                "datum out, or let the loss use it"
            )
        # Cross-entropy is -sum(weight * logprob), so these weights have the loss's gradient.
        weights = TensorData.from_torch_sparse(-values.grad)
        second.append(_with_inputs(datum, _targets(datum, index), weights))
    return second, float(loss.detach()), dict(metrics)


def with_custom_metrics(
    output: ForwardBackwardOutput, loss: float, metrics: Mapping[str, float]
) -> ForwardBackwardOutput:
    """The second pass's output as the user's loss would have it."""
    merged = dict(output.metrics)
    if "loss:sum" not in merged:
        raise KeyError("the service returned no loss:sum for the cross-entropy pass")
    surrogate = merged.pop("loss:sum")
    merged.update(metrics)
    merged["loss:sum"] = loss
    merged["surrogate_loss:sum"] = surrogate
    return ForwardBackwardOutput(output.loss_fn_output_type, output.loss_fn_outputs, merged)


def run_handle(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Each datum by itself; losses are summed, metrics by their suffix."""
    losses: list[Any] = []
    sums: dict[str, float] = {}
    for datum, values in zip(data, logprobs, strict=True):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
        loss, metrics = handle.graph(values, *inputs)
        if loss.ndim != 0:
            shape = tuple(loss.shape)
            raise ValueError(f"loss {handle.name!r} must return a scalar, got shape {shape}")
        losses.append(loss)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    means = {
        name: total / len(data) if name.endswith(":mean") else total for name, total in sums.items()
    }
    return sum(losses[1:], losses[0]), means


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Every datum must have what the loss reads, with the declared rank."""
    logprobs, *inputs = handle.inputs
    for index, datum in enumerate(data):
        for wanted, key in [(logprobs, "target_tokens"), *((each, each.name) for each in inputs)]:
            path = f"data[{index}].loss_fn_inputs[{key!r}]"
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                raise ValidationError(f"loss {handle.name!r} needs this tensor", path)
            rank = 1 if tensor.shape is None else len(tensor.shape)
            if rank != wanted.rank:
                raise ValidationError(
                    f"has rank {rank}, but loss {handle.name!r} declared {wanted.name} with rank "
                    f"{wanted.rank}",
                    path,
                )


def _targets(datum: Datum, index: int) -> TensorData:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValidationError(
            "a custom loss needs target_tokens", f"data[{index}].loss_fn_inputs['target_tokens']"
        )
    return targets


def _with_inputs(datum: Datum, targets: TensorData, weights: TensorData | None) -> Datum:
    import numpy as np

    if weights is None:
        zeros = np.zeros(targets.numpy.shape, dtype=np.float32)
        weights = TensorData(zeros, "float32", targets.shape, targets.csr_rows, targets.csr_columns)
    return Datum(
        model_input=datum.model_input,
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )


# --- Tracing and encoding ---------------------------------------------------------------------


def trace(
    fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank], session_id: str
) -> LossHandle:
    """The function as a graph of torch operations, or an error that says what is in the way."""
    import_torch("create a custom loss")
    import torch.fx

    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _declared_inputs(fn, name, input_ranks)
    try:
        graph = torch.fx.symbolic_trace(fn)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be traced: {error}. A custom loss cannot branch on tensor values or "
            "call libraries other than torch and math."
        ) from error
    for node in graph.graph.nodes:
        _check_node(name, node)
    return LossHandle(name=name, inputs=inputs, session_id=session_id, graph=graph)


def encode(handle: LossHandle) -> CustomLossGraph:
    """The graph as data, node for node."""
    nodes = [
        CustomLossNode(
            op=node.op,
            name=node.name,
            target=_target_name(node),
            args=[_argument(handle.name, each) for each in node.args],
            kwargs={key: _argument(handle.name, each) for key, each in node.kwargs.items()},
        )
        for node in handle.graph.graph.nodes
    ]
    return CustomLossGraph(nodes=nodes)


def import_torch(purpose: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"PyTorch is needed to {purpose}: pip install torch") from error
    return torch


def _declared_inputs(
    fn: Callable[..., Any], name: str, ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].name != "logprobs":
        raise ValueError(
            f"{name} must take logprobs first, then the loss_fn_inputs it reads, as in "
            "def loss(logprobs, advantages)"
        )
    if len(parameters) > MAX_LOSS_INPUTS:
        raise ValueError(
            f"{name} takes {len(parameters)} parameters; at most {MAX_LOSS_INPUTS} are possible"
        )
    for parameter in parameters:
        if not _INPUT_NAME.fullmatch(parameter.name):
            problem = "must be a lower-case name of letters, digits and underscores"
        elif parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            problem = "must be a plain positional parameter"
        elif parameter.default is not parameter.empty:
            problem = "must not have a default: it names an input that every datum has"
        else:
            continue
        raise ValueError(f"parameter {parameter.name!r} of {name} {problem}")
    names = [parameter.name for parameter in parameters]
    if set(ranks) != set(names):
        raise ValueError(
            f"input_ranks must give a rank for each parameter of {name} ({', '.join(names)}), "
            f"got {sorted(ranks)}"
        )
    if ranks["logprobs"] == 0:
        raise ValueError("logprobs has rank 1 ([T]) or 2 ([T, K])")
    return tuple(CustomLossInput(name=each, rank=ranks[each]) for each in names)


def _check_node(name: str, node: Any) -> None:
    import torch

    if node.op == "call_function":
        module = getattr(node.target, "__module__", None) or ""
        if node.target is not builtins.getattr and module.split(".")[0] not in _MODULES:
            called = getattr(node.target, "__qualname__", node.target)
            raise ValueError(
                f"{name} calls {called!r} from {module or 'an unknown module'!r}; a custom loss "
                "may only call torch and math"
            )
    elif node.op == "call_method":
        if not hasattr(torch.Tensor, node.target):
            raise ValueError(f"{name} calls {node.target!r}, which is no method of torch.Tensor")
        if node.target == "backward":
            raise ValueError(f"{name} calls backward(); return the loss, the rest is done for you")
        if node.target in _LEAVES_TORCH:
            raise ValueError(
                f"{name} calls {node.target}(), which leaves torch; keep every value, metrics too, "
                "as a tensor"
            )
    elif node.op == "call_module":
        raise ValueError(
            f"{name} uses the module {node.target!r}; use functions such as torch.nn.functional"
        )
    elif node.op == "get_attr":
        raise ValueError(
            f"{name} captures a tensor ({node.target!r}); a custom loss reads only logprobs and "
            "the loss_fn_inputs it names"
        )
    elif node.op == "output":
        _check_output(name, node.args[0])


def _check_output(name: str, output: Any) -> None:
    import torch.fx

    if not (isinstance(output, (tuple, list)) and len(output) == 2):
        raise ValueError(f"{name} must return (loss, metrics)")
    loss, metrics = output
    if not isinstance(loss, torch.fx.Node):
        raise ValueError(f"{name} must return its loss as a tensor, got {loss!r}")  # noqa: TRY004
    if not isinstance(metrics, dict):
        raise ValueError(f"{name} must return its metrics as a dict")  # noqa: TRY004
    for key, value in metrics.items():
        if not (isinstance(key, str) and _METRIC_NAME.fullmatch(key)):
            raise ValueError(
                f"metric {key!r} of {name} must be called custom/<name>:sum or custom/<name>:mean "
                "in lower case; the ending says how it combines over datums"
            )
        if not isinstance(value, torch.fx.Node):
            raise ValueError(f"metric {key!r} of {name} must be a tensor, got {value!r}")  # noqa: TRY004


def _target_name(node: Any) -> str:
    if node.op != "call_function":
        return str(node.target)
    from torch.fx.node import _get_qualified_name

    name: str = _get_qualified_name(node.target)
    # Python's operators live in a private module; on the wire they go by the public one.
    return name.removeprefix("_") if name.startswith("_operator.") else name


def _argument(name: str, value: Any) -> Any:
    import torch
    import torch.fx

    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_argument(name, each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_argument(name, each) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _argument(name, each) for key, each in value.items()}}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [_argument(name, each) for each in parts]}
    if value is Ellipsis:
        return {"ellipsis": True}
    for kind in ("dtype", "device", "layout", "memory_format"):
        if type(value) is getattr(torch, kind):
            return {kind: str(value).removeprefix("torch.")}
    raise ValueError(
        f"{name} passes a {type(value).__name__} to an operation, which cannot be sent"
    )

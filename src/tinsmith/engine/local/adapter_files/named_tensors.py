"""An adapter's flat vectors as named tensors, under the hosted service's names, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.adapter_names import PREFIX, hosted_module, without_text_part
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.errors import ValidationError

Place = tuple[int, torch.Size]


def places_of(adapter: Adapter) -> dict[str, Place]:
    """Where each named tensor lies in the adapter's vectors: its offset and shape."""
    start, names = adapter.flat.storage_offset(), _hosted_names(adapter)
    return {
        names[name]: (view.storage_offset() - start, view.shape)
        for name, view in adapter.named_tensors()
    }


def module_of(name: str) -> str:
    """`model.layers.0.mlp.up_proj`, of the name of its A or B."""
    return name.removeprefix(PREFIX).rsplit(".", 2)[0]


def split(vector: Tensor, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Views of a vector's named parts, on the CPU."""
    vector = vector.detach().cpu()
    return {
        name: vector[offset : offset + math.prod(shape)].view(shape)
        for name, (offset, shape) in places.items()
    }


def joined(tensors: Mapping[str, Tensor], adapter: Adapter, file: str) -> Tensor:
    """The vector whose named parts are `tensors`; they must be exactly those of the adapter."""
    places, hosted = places_of(adapter), HostedNames(adapter)
    tensors = {hosted.of(name): tensor for name, tensor in tensors.items()}
    for name in tensors.keys() ^ places.keys():
        problem = "is missing" if name in places else "has no place in this model"
        raise ValidationError(f"tensor {name!r} {problem}", file)
    vector = torch.empty(sum(math.prod(shape) for _, shape in places.values()))
    for name, part in split(vector, places).items():
        if tensors[name].shape != part.shape:
            raise ValidationError(
                f"tensor {name!r} has shape {list(tensors[name].shape)} where the model has "
                f"{list(part.shape)}",
                file,
            )
        part.copy_(tensors[name])
    return vector


class HostedNames:
    """The hosted service's names of tensors that may have the model's own."""

    def __init__(self, adapter: Adapter) -> None:
        names = _hosted_names(adapter)
        self._known = {without_text_part(old): new for old, new in names.items()}
        # The hosted service leaves out the `self` of gpt-oss's attention.
        self._known |= {k.replace(".self_attn.", ".attn."): new for k, new in self._known.items()}

    def of(self, name: str) -> str:
        """A name that is not known stays as it is."""
        return self._known.get(without_text_part(name), name)


def _hosted_names(adapter: Adapter) -> dict[str, str]:
    """From PEFT's names of the adapter's tensors to the hosted service's."""
    heads = adapter.unembedding_modules
    names = {}
    for name, _ in adapter.named_tensors():
        module, ending = module_of(name), name.rsplit(".", 2)[1:]
        hosted = hosted_module(module, is_unembedding=module in heads)
        names[name] = ".".join([PREFIX + hosted, *ending])
    return names

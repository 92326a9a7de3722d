"""What slots a server has: how many engines, each with its role and device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig

Role = Literal["train", "sample", "both"]

_MOST_ENGINES = 256

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    number: int = 0
    role: Role = "both"
    device: str = "auto"
    """With several ranks the device of each, as in "cuda:0+cuda:1", where they are named."""

    num_slots: int = 1
    """How many there are in all, which share the machine's cores."""

    num_on_device: int = 1
    """How many of them are on this one's device, and share its memory."""

    epoch: int = 0
    """The lease under which the engine is started; it counts up when another server takes over."""

    @property
    def trains(self) -> bool:
        return self.role != "sample"

    @property
    def samples(self) -> bool:
        return self.role != "train"


def slot_plans(config: ServerConfig, epoch: int = 0) -> tuple[SlotPlan, ...]:
    """One plan for each engine; devices and roles are dealt out in order, and again from the
    first."""
    named = _entries(config.devices)
    _check_devices(named, is_deterministic=config.deterministic)
    devices = _by_ranks(named, config.ranks) or [str(config.device)]
    roles = _entries(config.engine_roles) or ["both"]
    num_slots = config.engines if config.engines is not None else max(len(devices), len(roles))
    if not 1 <= num_slots <= _MOST_ENGINES:
        raise ValidationError(f"must be from 1 to {_MOST_ENGINES}, got {num_slots}", "engines")
    for name, entries in (("devices", devices), ("engine_roles", roles)):
        if len(entries) > num_slots:
            raise ValidationError(
                f"names {len(entries)} for {num_slots} engines; name fewer, or set 'engines'", name
            )
    _check_roles(roles)
    dealt = [devices[number % len(devices)] for number in range(num_slots)]
    return tuple(
        SlotPlan(
            number=number,
            role=cast("Role", roles[number % len(roles)]),
            device=device,
            num_slots=num_slots,
            num_on_device=dealt.count(device),
            epoch=epoch,
        )
        for number, device in enumerate(dealt)
    )


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _by_ranks(devices: list[str], ranks: int) -> list[str]:
    """The devices of each engine: so many each, one after another."""
    if ranks < 1:
        raise ValidationError(f"must be above zero, got {ranks}", "ranks")
    if len(devices) % ranks:
        raise ValidationError(
            f"names {len(devices)} for engines of {ranks} ranks; name {ranks} for each engine",
            "devices",
        )
    groups = [devices[first : first + ranks] for first in range(0, len(devices), ranks)]
    for group in groups:
        if len({device.partition(":")[0] for device in group}) > 1:
            raise ValidationError(
                f"the ranks of an engine need devices of one kind, not {', '.join(group)}",
                "devices",
            )
    return ["+".join(group) for group in groups]


def _check_devices(devices: list[str], *, is_deterministic: bool) -> None:
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ValidationError(
                f"expected auto, cpu, mps, cuda or cuda:NUMBER, got {device!r}", "devices"
            )
    kinds = {device.partition(":")[0] for device in devices}
    if is_deterministic and len(kinds) > 1:
        raise ValidationError(
            "a deterministic server needs devices of one kind: a model that moves from "
            f"{' to '.join(sorted(kinds))} would give other bits",
            "devices",
        )


def _check_roles(roles: list[str]) -> None:
    known = get_args(Role)
    for role in roles:
        if role not in known:
            raise ValidationError(
                f"expected {', '.join(known[:-1])} or {known[-1]}, got {role!r}", "engine_roles"
            )
    for needed in ("train", "sample"):
        if not {needed, "both"} & set(roles):
            raise ValidationError(f"no engine would {needed}; add {needed} or both", "engine_roles")

"""What must hold on this machine before anything is placed with Ray."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from tinsmith import extras
from tinsmith.errors import ValidationError

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
"""For our processes that use Ray: without it, Ray sends usage statistics to its makers."""


def check_ray(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to begin without Ray, or with one that lets anybody in."""
    if importlib.util.find_spec("ray") is None:
        raise ValidationError(f"needs Ray: {extras.install_line('ray')}", "cluster")
    if environ.get("RAY_AUTH_MODE") != "token":
        raise ValidationError(
            "needs a Ray cluster that asks for a token; without one, anyone who reaches one of "
            "its ports can run programs on all its machines. Start its nodes, and this server, "
            "with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN or ~/.ray/auth_token",
            "cluster",
        )

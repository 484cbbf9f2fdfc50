"""Carry a small model's KV cache into a larger one through learned maps."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbridge.assembly import Handoff, assemble, hand_off
    from kvbridge.bridge import Bridge
    from kvbridge.errors import KVBridgeError
    from kvbridge.model import KVModel
    from kvbridge.pair import ModelPair, load_pair
    from kvbridge.plan import HandoffPlan
    from kvbridge.states import ContentStates

# Names are resolved on first use, so that `import kvbridge` and `kvbridge --help` do not load torch.
_HOME = {
    "Bridge": "bridge",
    "ContentStates": "states",
    "Handoff": "assembly",
    "HandoffPlan": "plan",
    "KVBridgeError": "errors",
    "KVModel": "model",
    "ModelPair": "pair",
    "assemble": "assembly",
    "hand_off": "assembly",
    "load_pair": "pair",
}

__all__ = [
    "Bridge",
    "ContentStates",
    "Handoff",
    "HandoffPlan",
    "KVBridgeError",
    "KVModel",
    "ModelPair",
    "assemble",
    "hand_off",
    "load_pair",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("kvbridge")
    if name not in _HOME:
        raise AttributeError(f"module 'kvbridge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvbridge.{_HOME[name]}"), name)

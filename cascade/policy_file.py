"""Policies by name, and those that `kvbridge calibrate-policy` leaves in a file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbridge.cascade.policies import Above, Always, Never, Policy
from kvbridge.cascade.scores import SCORES, Score
from kvbridge.disk import write_whole
from kvbridge.errors import UsageError
from kvbridge.pair import ModelPair

FORMAT = "kvbridge-policy"
VERSION = 1


def measure_named(name: str, tokens: int) -> Score:
    """A measure of doubt by its name; `tokens` are drafted for one that looks at a draft.

    Raises:
        UsageError: there is none of that name, or no token is drafted.
    """
    if name not in SCORES:
        raise UsageError(f"{name!r} is no measure of doubt; expected one of {', '.join(SCORES)}.")
    made = SCORES[name]
    return made(tokens=tokens) if "tokens" in getattr(made, "__dataclass_fields__", {}) else made()


def save_policy(path: Path, policy: Above, identity: dict[str, str], evidence: dict[str, Any]) -> None:
    """Write a threshold, what it was found on and for which pair, all or nothing."""
    name = next(name for name, kind in SCORES.items() if type(policy.measure) is kind)
    settings: Any = policy.measure
    described = {
        "format": FORMAT,
        "version": VERSION,
        "measure": name,
        "settings": asdict(settings),
        "threshold": policy.threshold,
        "identity": identity,
        "evidence": evidence,
    }
    write_whole(path, json.dumps(described, indent=1, allow_nan=False) + "\n")


def load_policy(path: str | Path, pair: ModelPair | None = None) -> Above:
    """The policy in a file.

    Args:
        path: that `save_policy` wrote.
        pair: that it will be used with; checked where given.

    Raises:
        UsageError: there is no such file, or it holds no policy that this version reads.
        PairMismatchError: the threshold was found on another pair.
    """
    file = Path(path).expanduser()
    try:
        found = json.loads(file.read_text())
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError("another format")
        measure, threshold = SCORES[found["measure"]](**found["settings"]), float(found["threshold"])
        identity = dict(found["identity"])
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror or error}; give a file that kvbridge calibrate-policy wrote."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} holds no policy that this version reads; run kvbridge calibrate-policy.") from error
    if pair is not None:
        pair.require(identity, f"the threshold in {file}")
    return Above(measure, threshold)


def policy_named(name: str, threshold: float | None, tokens: int, pair: ModelPair | None = None) -> Policy:
    """`always`, `never`, a measure of doubt with a threshold, or what a file says.

    Raises:
        UsageError: a threshold is missing or not read, or there is neither measure nor file of that name.
        PairMismatchError: the threshold in the file was found on another pair.
    """
    if name in SCORES:
        if threshold is None or not math.isfinite(threshold):
            raise UsageError(f"policy {name} needs a threshold, and {threshold} was given; calibrate-policy finds one.")
        return Above(measure_named(name, tokens), threshold)
    if threshold is not None:
        raise UsageError(f"policy {name} reads no threshold; leave threshold={threshold} out.")
    if name in ("always", "never"):
        return Always() if name == "always" else Never()
    if not Path(name).expanduser().is_file():
        known = ", ".join(("always", "never", *SCORES))
        raise UsageError(f"policy {name!r} is neither a file nor one of {known}.")
    return load_policy(name, pair)

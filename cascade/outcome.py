"""What became of a hand-off; every answer of the target and every counter says it."""

from __future__ import annotations

from typing import Literal

Outcome = Literal["applied", "fallback_reprefill", "unsupported"]
Route = Literal["source", "target"]

# The target went on from a carried cache.
APPLIED: Outcome = "applied"
# A hand-off was tried or refused by the gate, and the target read the prompt itself.
FALLBACK: Outcome = "fallback_reprefill"
# There was nothing to try: no bridge, or a prompt too short to carry anything. The target read the prompt itself.
UNSUPPORTED: Outcome = "unsupported"
OUTCOMES: tuple[Outcome, ...] = (APPLIED, FALLBACK, UNSUPPORTED)

"""The hand-off plan: which parts of a prompt are carried and which the target computes itself.

    prompt   [ 0 … s−1 | s ……………………………… T−w−1 | T−w … T−1 ]
               sinks     carried                   tail
    layers
      0 … m    exact     exact (native head)       exact
      m+1 …    exact     mapped from the source    read by the target over what is carried
      L−n …    exact     recomputed by the target from a mapped residual stream (tail recompute)

The prompt has T tokens, the plan s sink tokens and w ≥ 1 tail tokens. Sinks are exact because nothing precedes them
that is not a sink. Sinks and tail are one forward pass of the target, in which a token at position p sees exactly the
positions up to p. The last prompt token is always among the tail, so the logits that follow the prompt are the
target's own, over a cache of which the middle is an approximation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbridge.errors import PlanError


@dataclass(frozen=True, slots=True)
class Split:
    """How a plan divides a prompt of `prompt_length` tokens: sinks, carried tokens, tail.

    Attributes:
        carried_start: first carried position; sinks, and what an earlier hand-off left, lie before it.
        carried_stop: one past the last carried position, which is also the first tail position.
        prompt_length: `T`.
        held: first tokens that the target's cache holds already.
    """

    carried_start: int
    carried_stop: int
    prompt_length: int
    held: int = 0

    @property
    def carried(self) -> int:
        """How many tokens are carried."""
        return self.carried_stop - self.carried_start

    @property
    def native(self) -> int:
        """How many tokens the target reads itself, through all layers."""
        return self.prompt_length - self.carried - self.held


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """What the target computes natively at a hand-off.

    Attributes:
        sinks: first tokens of the prompt, computed by the target.
        native_head: the target runs layers `0 … m − 1` on the prompt, which makes the keys and values of layers
            `0 … m` exact; 0 costs next to nothing, since layer 0 depends on the embedding alone; `None` maps all.
        native_tail: last tokens of the prompt, read by the target over what is carried.
        tail_recompute: last layers `n` whose keys and values the target computes from a mapped residual stream at the
            input of layer `L − n`; with 1 that is one norm and its projections, and no attention.
        native_attended: share of the carried tokens that the target reads itself, over the mapped rest; they are those
            which the scouts attend to most.
        scouts: the last tokens of the prompt, of the tail at most, whose attention over what is carried chooses them.

    Raises:
        PlanError: a number is out of range.
    """

    sinks: int = 4
    native_head: int | None = 0
    native_tail: int = 16
    tail_recompute: int = 0
    native_attended: float = 0.0
    scouts: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise PlanError(f"plan.sinks={self.sinks}: give the number of first tokens to compute natively, 0 or more.")
        if self.native_head is not None and self.native_head < 0:
            raise PlanError(f"plan.native_head={self.native_head}: give 0 or more layers, or null to map layer 0 too.")
        if self.native_tail < 1:
            raise PlanError(
                f"plan.native_tail={self.native_tail}: the target must read at least the last prompt token; "
                "give 1 or more."
            )
        if self.tail_recompute < 0:
            raise PlanError(f"plan.tail_recompute={self.tail_recompute}: give the number of last layers, 0 or more.")
        if not 0 <= self.native_attended < 1:
            raise PlanError(
                f"plan.native_attended={self.native_attended}: give the share of the carried tokens that the target "
                "reads itself, 0 or more and below 1."
            )
        if self.scouts < 1:
            raise PlanError(f"plan.scouts={self.scouts}: give the number of last tokens that choose, 1 or more.")

    def split(self, prompt_length: int, held: int = 0) -> Split:
        """Divide a prompt; one that is too short to carry anything is all tail.

        Args:
            prompt_length: `T`.
            held: first tokens that the target's cache holds already.

        Raises:
            PlanError: the prompt is empty, or all of it is held.
        """
        if prompt_length < 1:
            raise PlanError("the prompt is empty; a hand-off needs at least one token.")
        if not 0 <= held < prompt_length:
            raise PlanError(f"the target holds {held} tokens of a prompt of {prompt_length}; nothing is left to read.")
        start, stop = max(self.sinks, held), prompt_length - self.native_tail
        if stop <= start:
            return Split(held, held, prompt_length, held)
        return Split(start, stop, prompt_length, held)

    def attended(self, carried: int) -> int:
        """How many of so many carried tokens the target reads itself."""
        return round(self.native_attended * carried)

    def mapped_layers(self, layers: int) -> range:
        """The target layers of which a map must supply keys and values.

        With a tail recompute it must supply the residual stream at the input of the layer after them too.

        Raises:
            PlanError: native head and tail recompute leave no layer to map.
        """
        first = 0 if self.native_head is None else self.native_head + 1
        if first >= layers:
            raise PlanError(
                f"plan.native_head={self.native_head} makes all {layers} target layers exact; "
                f"give at most {layers - 2}, or run the target natively."
            )
        if first >= layers - self.tail_recompute:
            head = "null" if self.native_head is None else self.native_head
            raise PlanError(
                f"plan.native_head={head} and plan.tail_recompute={self.tail_recompute} leave none of {layers} target "
                f"layers to map; give plan.tail_recompute={layers - first - 1} or less."
            )
        return range(first, layers - self.tail_recompute)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

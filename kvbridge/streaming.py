"""Map a prompt while the source still reads or writes it, so that little is left to map when it is handed over.

tokens   [ sinks | fed before ……… | new ]        each call maps what is new, with the target's native head of it
at the end       [ carried ……………………… | tail ]   what was mapped of the tail is not used
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from kvbridge.assembly import Handoff, assemble
from kvbridge.carried import RotatedStates
from kvbridge.errors import CacheError
from kvbridge.forms import WritingMap
from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.native import NativeHead
from kvbridge.plan import HandoffPlan
from kvbridge.states import CachedStates, ContentStates


class HandoffStream:
    """One prompt on its way from the source to a target that holds nothing yet.

    What it leaves equals what a hand-off of the whole prompt gives, up to the order in which products are summed.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        mapping: from source to target states.

    Raises:
        PlanError: the plan leaves no layer to map.
    """

    def __init__(self, target: KVModel, plan: HandoffPlan, mapping: WritingMap) -> None:
        self.target, self.plan, self.mapping = target, plan, mapping
        self.layers = plan.mapped_layers(target.geometry.layers)
        self._ids: Int[Tensor, "B T"] | None = None
        self._mapped: Tensor | None = None
        self._residual: list[dict[int, Tensor]] = []
        self._past: list[tuple[Tensor, Tensor]] = []
        self._streams: list[list[Tensor]] = []

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that were fed."""
        return 0 if self._ids is None else self._ids.shape[1]

    def feed(self, source: ContentStates | CachedStates, input_ids: Int[Tensor, "B T"]) -> None:
        """Map the tokens that were not fed before.

        Args:
            source: states of all tokens that the source has read.
            input_ids: these tokens; those of earlier calls come first.

        Raises:
            CacheError: the source has read other tokens, the prompt does not go on from what was fed, or what the map
                makes is unusable.
        """
        self._require_continuation(source, input_ids)
        first, stop = max(self.tokens, self.plan.sinks), source.tokens
        self._extend_head(input_ids)
        self._ids = input_ids
        if first < stop:
            place = self._room(stop)[..., first:stop, :]
            part = source.span(first, stop)
            made = self.mapping.write(part, self.layers, place, self.target.rotary, self._native(first))
            self._residual.append(made)

    def hand_off(self, source: ContentStates | CachedStates, input_ids: Int[Tensor, "B T"]) -> Handoff:
        """Feed what is left of the prompt and give it to the target.

        Args:
            source: states of the whole prompt.
            input_ids: the prompt.

        Raises:
            CacheError: as `feed`.
            PlanError: the prompt is empty, or the plan chooses attended tokens for more than one prompt.
        """
        self.feed(source, input_ids)
        split = self.plan.split(input_ids.shape[1])
        if self._mapped is None or not split.carried:
            return assemble(self.target, self.plan, input_ids, None)
        carried = slice(split.carried_start, split.carried_stop)
        positions = torch.arange(carried.start, carried.stop, device=self._mapped.device)
        residual = {
            layer: torch.cat([part[layer] for part in self._residual], dim=1)[:, : split.carried]
            for layer in self._residual[0]
        }
        states = RotatedStates(self._mapped[..., carried, :], positions, residual)
        return assemble(self.target, self.plan, input_ids, states, head=self._head(split.carried_stop))

    def _require_continuation(self, source: ContentStates | CachedStates, input_ids: Int[Tensor, "B T"]) -> None:
        if source.tokens != input_ids.shape[1]:
            raise CacheError(
                f"the source has read {source.tokens} tokens and the prompt has {input_ids.shape[1]}; "
                "both must be the same text."
            )
        if self._ids is not None and not torch.equal(self._ids, input_ids[:, : self.tokens]):
            raise CacheError(
                f"the prompt does not begin with the {self.tokens} tokens that were mapped already; begin a new stream."
            )

    def _extend_head(self, input_ids: Int[Tensor, "B T"]) -> None:
        """Run the plan's native head on the tokens that were not fed before."""
        if self.plan.native_head is None or input_ids.shape[1] == self.tokens:
            return
        made = run_head(self.target.model, input_ids[:, self.tokens :], self.plan.native_head, past=self._past)
        self._past = made.layers
        self._streams.append(made.residual)

    def _native(self, first: int) -> ContentStates | None:
        """What the native head says of the newest tokens, from position `first` on."""
        if not self._streams:
            return None
        newest = self._streams[-1]
        held = self.tokens - newest[0].shape[1]
        return NativeHead(*self._cached_head(self.tokens), newest, held).states(self.target, first, self.tokens)

    def _head(self, stop: int) -> NativeHead | None:
        """The native head of the first tokens."""
        if not self._streams:
            return None
        residual = [torch.cat(parts, dim=1)[:, :stop] for parts in zip(*self._streams, strict=True)]
        return NativeHead(*self._cached_head(stop), residual)

    def _cached_head(self, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = (torch.stack([layer[part][..., :stop, :] for layer in self._past]) for part in (0, 1))
        return keys, values

    def _room(self, tokens: int) -> Tensor:
        """The mapped states, with room for so many tokens; it doubles as it grows."""
        held = self._mapped
        if held is not None and held.shape[-2] >= tokens:
            return held
        geometry, batch = self.target.geometry, 1 if self._ids is None else self._ids.shape[0]
        room = tokens if held is None else max(tokens, 2 * held.shape[-2])
        grown = torch.zeros(
            (2, len(self.layers), batch, geometry.kv_heads, room, geometry.head_dim),
            dtype=self.target.dtype,
            device=self.target.device,
        )
        if held is not None:
            grown[..., : held.shape[-2], :] = held
        self._mapped = grown
        return grown

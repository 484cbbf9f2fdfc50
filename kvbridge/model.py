"""One model of a pair: the transformer with its KV geometry, rotary codec and fingerprint."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache

from kvbridge import compat
from kvbridge.fingerprint import fingerprint_model
from kvbridge.geometry import KVGeometry, read_geometry
from kvbridge.rotary import RotaryCodec, read_rotary
from kvbridge.states import CachedStates, ContentStates, cached_states, content_states


def let_go() -> None:
    """Free the memory of models that nobody holds any longer."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class KVModel:
    """A loaded model and what a hand-off needs to know of it.

    Attributes:
        model: the transformer, in evaluation mode.
        geometry: shape of its KV cache.
        rotary: strips and applies its rotary embedding.
        fingerprint: digest of its weights.
        name: folder or hub id it came from.
        revision: hub revision, where there is one.
    """

    model: transformers.PreTrainedModel
    geometry: KVGeometry
    rotary: RotaryCodec
    fingerprint: str
    name: str
    revision: str | None = None

    @classmethod
    def wrap(cls, model: transformers.PreTrainedModel, name: str = "", revision: str | None = None) -> KVModel:
        """Read geometry, rotary codec and fingerprint from a loaded model.

        Raises:
            UnsupportedModelError: the model's cache cannot be carried.
        """
        model.eval()
        geometry = read_geometry(model)
        return cls(
            model,
            geometry,
            read_rotary(model),
            fingerprint_model(model),
            name or str(model.config.name_or_path),
            revision,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def prefill(
        self, input_ids: Int[Tensor, "B T"], logits_to_keep: int = 1
    ) -> tuple[DynamicCache, Float[Tensor, "B K V"]]:
        """Read a prompt: its cache, and the logits of its last `logits_to_keep` tokens."""
        cache = compat.empty_cache(self.model)
        with torch.no_grad():
            output = compat.run(self.model, input_ids, cache, logits_to_keep=logits_to_keep)
        return cache, output.logits

    def read(self, input_ids: Int[Tensor, "B T"]) -> DynamicCache:
        """Read a prompt for its cache alone, without the language-model head."""
        cache = compat.empty_cache(self.model)
        with torch.no_grad():
            compat.run(compat.backbone(self.model), input_ids, cache)
        return cache

    def extend(self, cache: Cache, input_ids: Int[Tensor, "B T"], start: int) -> Float[Tensor, "B T V"]:
        """Logits of tokens at positions `start … start + T − 1` that follow `cache`, which grows by them."""
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        with torch.no_grad():
            return compat.run(self.model, input_ids, cache, position_ids=positions[None]).logits

    def content(self, cache: Cache, positions: Int[Tensor, "T"] | None = None) -> ContentStates:
        """Content states of a cache that this model filled.

        Raises:
            CacheError: the cache is incomplete, misshapen or not finite.
        """
        return content_states(cache, self.geometry, self.rotary, positions)

    def cached(self, cache: Cache, positions: Int[Tensor, "T"] | None = None) -> CachedStates:
        """A cache that this model filled, as it lies: what a hand-off reads without a copy.

        Raises:
            CacheError: the cache is incomplete or misshapen.
        """
        return cached_states(cache, self.geometry, self.rotary, positions)

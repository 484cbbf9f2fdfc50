"""Take RoPE's rotation off cached keys and put it on again, with the live model's own tables.

For one rotary pair at one position the model computes `r = [[c, −s], [s, c]] x`, with `c` and `s` rounded to its own
dtype and, for some scalings, multiplied by a factor. The inverse is `[[c, s], [−s, c]] r / (c² + s²)`: dividing by
`c² + s²` undoes both the rounding and the factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvbridge import compat
from kvbridge.errors import UnsupportedModelError

PROBE_POSITIONS = (0, 1, 7, 61, 250)


def _pair_turn(x: Float[Tensor, "*batch R"], interleaved: bool) -> Float[Tensor, "*batch R"]:
    """Each rotary pair (a, b) becomes (−b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@dataclass(frozen=True, slots=True)
class RotaryCodec:
    """Strips and applies one model's rotary embedding.

    Attributes:
        module: the model's own rotary module, whose tables are used.
        dtype: the dtype in which the model uses those tables.
        interleaved: whether pairs are neighbours (2i, 2i+1) or halves (i, i + R/2).
    """

    module: nn.Module
    dtype: torch.dtype
    interleaved: bool

    def tables(self, positions: Int[Tensor, "T"]) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]:
        """Cosines and sines at absolute positions, as the model uses them, in fp32; `R ≤ D` is the rotary width."""
        reference = torch.empty(0, dtype=self.dtype, device=positions.device)
        with torch.no_grad():
            cos, sin = self.module(reference, positions[None])
        return cos[0].float(), sin[0].float()

    def inverse_tables(self, positions: Int[Tensor, "T"]) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]:
        """Cosines and sines that undo the rotation at absolute positions, in fp32."""
        cos, sin = self.tables(positions)
        norm = cos.square() + sin.square()
        return cos / norm, -sin / norm

    def strip(self, keys: Float[Tensor, "*batch T D"], positions: Int[Tensor, "T"]) -> Float[Tensor, "*batch T D"]:
        """De-rotated (content) keys, in fp32, of rotated keys at `positions`."""
        return self._rotate(keys, *self.inverse_tables(positions))

    def apply(self, keys: Float[Tensor, "*batch T D"], positions: Int[Tensor, "T"]) -> Float[Tensor, "*batch T D"]:
        """Rotated keys, in fp32, of content keys at `positions`."""
        return self._rotate(keys, *self.tables(positions))

    def seen_from(self, second: Float[Tensor, "*batch D D"], distances: tuple[int, ...]) -> Float[Tensor, "*batch D D"]:
        """What the queries' second moment weighs content keys by, in the mean over how far the keys stand behind.

        For `S` the mean of `q qᵀ` this is the mean of `R(Δ)ᵀ S R(Δ)` over distances Δ, with `qᵀ R(Δ) k` the product of
        a query and a key without their rotations. In closed form: as `R(Δ)ᵀ q` is `c ∘ q + s ∘ t(q)`, with t the
        quarter turn of every rotary pair, only the mean products of cosines and sines are needed.

        Args:
            second: `S` of each head, in fp64.
            distances: in tokens.
        """
        # Without the rounding to the model's dtype, which differs from position to position.
        exact = replace(self, dtype=torch.float32)
        cos, sin = exact.tables(torch.tensor((0, *distances), device=second.device))
        # A scaled table scales queries and keys alike; the key's factor is its cosine at distance 0.
        cos, sin = (table[1:].to(second) * cos[0].to(second) for table in (cos, sin))
        rest = second.shape[-1] - cos.shape[-1]
        cos, sin = nn.functional.pad(cos, (0, rest), value=1.0), nn.functional.pad(sin, (0, rest))
        turned = self._turn(second, cos.shape[-1] - rest)
        both = self._turn(turned.mT, cos.shape[-1] - rest).mT
        mixed = (cos.T @ sin) * turned
        return ((cos.T @ cos) * second + mixed + mixed.mT + (sin.T @ sin) * both) / len(distances)

    def _turn(self, x: Float[Tensor, "*batch D"], width: int) -> Float[Tensor, "*batch D"]:
        """The quarter turn of the first `width` coordinates' pairs; nothing of the others."""
        turned = _pair_turn(x[..., :width], self.interleaved)
        return nn.functional.pad(turned, (0, x.shape[-1] - width))

    def _rotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        rotary, rest = keys[..., :width].float(), keys[..., width:].float()
        turned = rotary * cos + _pair_turn(rotary, self.interleaved) * sin
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def _probe_keys(model: transformers.PreTrainedModel, positions: Tensor) -> list[Float[Tensor, "H T D"]]:
    """Keys of every layer for one and the same token, alone in its row, at every one of `positions`."""
    token = min(7, model.config.get_text_config(decoder=True).vocab_size - 1)
    input_ids = torch.full((len(positions), 1), token, device=positions.device)
    cache = compat.empty_cache(model)
    with torch.no_grad():
        compat.run(compat.backbone(model), input_ids, cache, position_ids=positions[:, None])
    stored = [compat.layer_tensors(cache, layer) for layer in range(len(cache.layers))]
    return [tensors[0].squeeze(2).transpose(0, 1) for tensors in stored if tensors is not None]


def _explained(codec: RotaryCodec, keys: Tensor, positions: Tensor) -> float:
    """How far content keys of one token at different positions are apart, relative to their size."""
    content = codec.strip(keys, positions)
    centre = content.mean(dim=-2, keepdim=True)
    return float((content - centre).norm() / content.norm().clamp_min(1e-30))


def read_rotary(model: transformers.PreTrainedModel) -> RotaryCodec:
    """The codec of a loaded model, proved on the model's own keys.

    A token that sees only itself has the same hidden states at every position, so its keys must be equal too once the
    rotation is off. That decides between the two pairings and catches a wrong table and a layer without rotation.

    Raises:
        UnsupportedModelError: there is no rotary module, its frequencies were cast, or it does not explain the keys.
    """
    module = getattr(compat.backbone(model), "rotary_emb", None)
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} has no rotary module, so its keys cannot be de-rotated.")
    frequencies = getattr(module, "inv_freq", None)
    if isinstance(frequencies, Tensor) and frequencies.dtype != torch.float32:
        raise UnsupportedModelError(
            f"the rotary frequencies of {type(model).__name__} were cast to {frequencies.dtype}; load the model with "
            f"dtype={model.dtype} instead of calling .to({model.dtype})."
        )
    positions = torch.tensor(PROBE_POSITIONS, device=model.device)
    probes = _probe_keys(model, positions)
    codecs = [RotaryCodec(module, model.dtype, interleaved) for interleaved in (False, True)]
    codec = min(codecs, key=lambda codec: _explained(codec, probes[0], positions))
    for layer, keys in enumerate(probes):
        spread = _explained(codec, keys, positions)
        # bf16 storage leaves 2e-3; a wrong pairing or table leaves more than 0.1.
        if not spread < 0.02:
            raise UnsupportedModelError(
                f"the rotary module of {type(model).__name__} does not explain its own keys in layer {layer}: the same "
                f"token at different positions differs by {spread:.1%} after de-rotation, expected under 2 %."
            )
    return codec

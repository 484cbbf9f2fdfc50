"""What the target's attention makes of an error in its keys and values.

A query q at distance Δ sees an error e of a content key as `qᵀ R(Δ) e` in its logit, with R the model's rotation and q
without its own, so a key head's errors are counted by the mean of `R(Δ)ᵀ q qᵀ R(Δ)` over texts and distances, summed
over the query heads that read the head. The residual stream sees an error e of a value as `W e` times the attention
that its token gets, with W the part of the output projection that belongs to a query head, so a value head's errors
are counted by the sum of `WᵀW` over the same heads; how much attention that is, squared, counts as the same for all
tokens and heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.products import MomentBlock
from kvbridge.calibration.tensorfile import TensorFile
from kvbridge.forms import KINDS

# Asks for the metric beside products, in the place of one.
ATTENTION: MomentBlock = ("attention", "attention")
NAMES = {kind: f"attention/{kind}" for kind in KINDS}


@dataclass(frozen=True, slots=True)
class AttentionMetric:
    """Squares by which errors of content keys and values are counted, for each layer and KV head.

    In these squares the keys of one layer vary by 1 in all, and so do its values.

    Attributes:
        keys: `M` of `eᵀ M e` for an error e of a key.
        values: the same for values.
    """

    keys: Float[Tensor, "L H D D"]
    values: Float[Tensor, "L H D D"]

    def tensors(self) -> dict[str, Tensor]:
        """Both by name, to be stored."""
        return {name: getattr(self, kind) for kind, name in NAMES.items()}

    @classmethod
    def stored(cls, file: TensorFile) -> AttentionMetric | None:
        """What `tensors` gave; `None` where the file holds none.

        Raises:
            CalibrationError: it is damaged.
            ValueError: its tensors do not belong together.
        """
        shapes = {file.shapes[name] for name in NAMES.values() if name in file.shapes}
        if not shapes:
            return None
        if len(shapes) > 1 or not file.shapes.keys() >= set(NAMES.values()) or len(shapes.pop()) != 4:
            raise ValueError("the metric of attention is incomplete")
        return cls(**{kind: file.read(name).clone() for kind, name in NAMES.items()})

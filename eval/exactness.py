"""Is what exact mode writes the target's own text, and where it is not, was it a near-tie?

In fp32 greedy text is the same token for token. In a narrower type the target does not even agree with itself: logits
round otherwise when a text is read at once, in pieces or token by token, so the choice between two tokens that are all
but equal can fall either way. Such a place is told from an error by comparing the gap between the two tokens with the
differences between these native readings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.cascade.reader import Reader
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.writing import agreeing
from kvbridge.errors import UsageError
from kvbridge.model import KVModel

PIECE = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the target's own.

    Attributes:
        at: its place among the new tokens.
        gap: between the target's logits of the two tokens, in nats.
        noise: largest difference between the target's logits there when it reads the text as `generate` does, at once,
            and in pieces.
    """

    at: int
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether native readings can differ about the two tokens."""
        return self.gap <= 2 * self.noise


def own_tokens(
    target: KVModel, input_ids: Int[Tensor, "B T"], params: SamplingParams, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """What transformers' `generate` writes greedily after one prompt, up to an end token or with a stop string.

    Raises:
        UsageError: the parameters are not greedy.
    """
    if params.temperature > 0:
        raise UsageError(f"temperature={params.temperature}: only greedy text can be compared; give 0.")
    given: dict[str, Any] = {"stop_strings": list(params.stop), "tokenizer": tokenizer} if params.stop else {}
    generate: Any = target.model.generate
    output = generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=params.max_new_tokens,
        repetition_penalty=params.repetition_penalty,
        do_sample=False,
        pad_token_id=0,
        **given,
    )
    return output[0, input_ids.shape[1] :].tolist()


def first_difference(
    target: KVModel, input_ids: Int[Tensor, "B T"], written: list[int], own: list[int]
) -> Difference | None:
    """Where two greedy continuations of one prompt part, and how sure the target was there; `None` where they agree."""
    at = agreeing(written, own)
    if at == min(len(written), len(own)):
        return None
    prompt: list[int] = input_ids[0].tolist()
    text = [*prompt, *own[:at]]
    as_generated = _read(target, [prompt, *([token] for token in own[:at])])
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    others = torch.stack([_read(target, [text]), _read(target, pieces)])
    gap = float((as_generated[own[at]] - as_generated[written[at]]).abs())
    return Difference(at, gap, float((others - as_generated).abs().max()))


def _read(target: KVModel, parts: list[list[int]]) -> Float[Tensor, "V"]:
    """The target's logits after a text that it reads in these parts, in fp32."""
    reader = Reader.fresh(target)
    for part in parts[:-1]:
        reader.take_in(part)
    return reader.read(parts[-1])[0].float()

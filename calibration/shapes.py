"""What the size of a calibration depends on in a model, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.checkpoint import load_config
from kvbridge.errors import UsageError
from kvbridge.flops import ModelCost
from kvbridge.pair import shown_name


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model of the Llama or Qwen kind: attention with separate projections and a gated MLP.

    Attributes:
        name: what to call it.
        layers: decoder layers.
        hidden_size: width of the residual stream.
        query_heads: query heads per layer.
        kv_heads: key-value heads per layer.
        head_dim: width of one head.
        intermediate: width inside the MLP.
        vocabulary: rows of the embedding.
        tied: whether the embedding is the language-model head as well.
    """

    name: str
    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def kv_width(self) -> int:
        """Numbers per token that one layer's keys, or its values, hold."""
        return self.kv_heads * self.head_dim

    @property
    def width(self) -> int:
        """Those of all layers."""
        return self.layers * self.kv_width

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer's products."""
        attention = 2 * self.hidden_size * self.head_dim * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights but biases and norms, which are few."""
        return self.layers * self.layer_weights + self.hidden_size * self.vocabulary * (1 if self.tied else 2)

    def cost(self) -> ModelCost:
        """Operation counts of the model."""
        return ModelCost(
            layers=self.layers,
            per_token=2 * self.layer_weights,
            projections=2 * self.hidden_size * self.head_dim * (self.query_heads + 2 * self.kv_heads),
            per_pair=4 * self.query_heads * self.head_dim,
            head=2 * self.hidden_size * self.vocabulary,
        )

    @classmethod
    def of_config(cls, config: Any, name: str) -> ModelShape:
        """Read a config of transformers.

        Raises:
            UsageError: it lacks a size, so the model is of another kind.
        """
        text = config.get_text_config(decoder=True)
        try:
            heads = text.num_attention_heads
            return cls(
                name=name,
                layers=text.num_hidden_layers,
                hidden_size=text.hidden_size,
                query_heads=heads,
                kv_heads=getattr(text, "num_key_value_heads", None) or heads,
                head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
                intermediate=text.intermediate_size,
                vocabulary=text.vocab_size,
                tied=bool(text.tie_word_embeddings),
            )
        except AttributeError as error:
            raise UsageError(
                f"the sizes of {name} cannot be told from its config ({error}); expected a model of the Llama kind."
            ) from error


_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocabulary": 151_936}
_QWEN25 = {"kv_heads": 2, "vocabulary": 151_936, "tied": True}
KNOWN = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-0.6b", 28, 1024, 16, intermediate=3072, tied=True, **_QWEN3),
        ModelShape("qwen3-1.7b", 28, 2048, 16, intermediate=6144, tied=True, **_QWEN3),
        ModelShape("qwen3-8b", 36, 4096, 32, intermediate=12_288, tied=False, **_QWEN3),
        ModelShape("qwen3-32b", 64, 5120, 64, intermediate=25_600, tied=False, **_QWEN3),
        ModelShape("qwen2.5-coder-0.5b", 24, 896, 14, head_dim=64, intermediate=4864, **_QWEN25),
        ModelShape("qwen2.5-coder-1.5b", 28, 1536, 12, head_dim=128, intermediate=8960, **_QWEN25),
    )
}


def model_shape(name: str) -> ModelShape:
    """A model's sizes by name, or from the `config.json` in a folder.

    Raises:
        UsageError: it is neither.
    """
    known = KNOWN.get(name.lower().rpartition("/")[2].removesuffix("-instruct"))
    if known is not None and not Path(name).exists():
        return known
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise UsageError(f"{name} is neither a folder with config.json nor one of {', '.join(KNOWN)}.")
    return ModelShape.of_config(load_config(str(folder)), shown_name(str(folder)))

"""Spans of layers: their text and their widths."""

import pytest

from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.variables import Span

GEOMETRY = KVGeometry("llama", 6, 2, 16, 4, 48, 512, {}, "default", "none")


@pytest.mark.parametrize(
    ("text", "span", "width"),
    [
        ("source.keys", Span("source.keys", 0, 6), 6 * 32),
        ("target.values[2:5]", Span("target.values", 2, 5), 3 * 32),
        ("target.normed_residual[4:5]", Span("target.normed_residual", 4, 5), 48),
    ],
)
def test_text_and_width(text: str, span: Span, width: int) -> None:
    parsed = Span.parse(text, GEOMETRY.layers)
    assert parsed == span
    assert parsed.width(GEOMETRY) == width
    assert Span.parse(str(parsed), GEOMETRY.layers) == span


@pytest.mark.parametrize(
    "text", ["source.residual", "target.keys[3:3]", "target.keys[0:7]", "target.keys[a:b]", "keys", ""]
)
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Span.parse(text, GEOMETRY.layers)

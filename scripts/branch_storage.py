"""How far bf16 and int8 weights take a residual branch from the one in fp32, on the embedded pair's states.

The branch has a random first matrix on whitened inputs, and the second that best explains what a ridge map leaves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvbridge.branch import ACTIVATIONS, ResidualBranch
from kvbridge.calibration import open_corpus
from kvbridge.calibration.draw import Draw
from kvbridge.embedded import CALIBRATION_TEXT
from kvbridge.kernels.reference import branch_rows, rows_of
from kvbridge.pair import ModelPair, load_pair
from kvbridge.storage import pack_weights, unpack_weights
from kvbridge.variables import Span

TOKENS, BLOCK, RANK, PENALTY = 8192, 256, 128, 1e-3


def read(pair: ModelPair) -> tuple[tuple[Span, ...], tuple[Span, ...], Tensor, Tensor]:
    """Inputs and outputs, and their centred rows in fp64 (inputs as they are)."""
    layers, made = pair.source.geometry.layers, pair.target.geometry.layers
    inputs = (Span("source.keys", 0, layers), Span("source.values", 0, layers))
    outputs = (Span("target.keys", 1, made), Span("target.values", 1, made))
    drawn = Draw(TOKENS, BLOCK, held_out=0.25, seed=0).blocks(open_corpus(str(CALIBRATION_TEXT)), pair.tokenizer)
    rows: list[tuple[Tensor, Tensor]] = []
    for at in range(0, len(drawn), 8):
        ids = drawn.batch(list(range(at, min(at + 8, len(drawn)))))
        source, target = (model.content(model.read(ids)).span(4, BLOCK) for model in (pair.source, pair.target))
        rows.append((rows_of(inputs, source, None).flatten(0, 1), rows_of(outputs, source, target).flatten(0, 1)))
    x, y = (torch.cat(parts).double() for parts in zip(*rows, strict=True))
    return inputs, outputs, x, y - y.mean(0)


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Weights of centred inputs, with a penalty on the correlation scale."""
    spread = x.std(0)
    scaled = x / spread
    gram = scaled.T @ scaled + penalty * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(gram, scaled.T @ y) / spread[:, None]


def shortened(form: ResidualBranch) -> dict[str, ResidualBranch]:
    """The branch with both weight matrices in each storage."""
    halves = {name: getattr(form, name).to(torch.bfloat16) for name in ("reduce", "expand")}
    packed = pack_weights({f"map/0.{name}": getattr(form, name) for name in ("reduce", "expand")})
    whole = unpack_weights({name.removeprefix("map/0."): part for name, part in packed.items()}, "the branch")
    return {"bf16": replace(form, **halves), "int8": replace(form, **whole)}


def main() -> None:
    torch.manual_seed(0)
    pair = load_pair("embedded", dtype="float32")
    inputs, outputs, x, y = read(pair)
    fit, held, heads = slice(0, int(0.8 * len(x))), slice(int(0.8 * len(x)), None), pair.target.geometry
    mean = x[fit].mean(0)
    left = y - (x - mean) @ ridge(x[fit] - mean, y[fit], PENALTY)
    values, vectors = torch.linalg.eigh((x[fit] - mean).T @ (x[fit] - mean) / len(x[fit]))
    print(f"{len(x)} rows of {x.shape[1]} inputs and {y.shape[1]} outputs")
    for directions in (256, len(values)):
        floor = values[-1] * 1e-7
        whitening = vectors[:, -directions:] / values[-directions:].clamp_min(floor).sqrt()
        for activation, wide in ACTIVATIONS.items():
            drawn = torch.randn(directions, RANK * wide, dtype=torch.float64) / directions**0.5
            reduce = whitening @ drawn
            zeros = torch.zeros(RANK, y.shape[1]), torch.zeros(y.shape[1])
            parts = reduce.float(), (-mean @ reduce).float(), *zeros
            bare = ResidualBranch(inputs, outputs, activation, *parts, heads.kv_heads, heads.head_dim)
            between = branch_rows(bare, x[None].float())[0].double()
            gram = between[fit].T @ between[fit] + 1e-2 * len(x[fit]) * torch.eye(RANK, dtype=x.dtype)
            form = replace(bare, expand=torch.linalg.solve(gram, between[fit].T @ left[fit]).float())
            exact = between[held].float() @ form.expand
            errors = {
                name: float((branch_rows(each, x[None, held].float())[0] @ each.expand.float() - exact).norm())
                / float(exact.norm())
                for name, each in shortened(form).items()
            }
            shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
            print(f"{directions} directions, {activation}: off by {shown}", flush=True)


if __name__ == "__main__":
    main()

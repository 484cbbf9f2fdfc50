"""What both models make of a document, kept on disk while a training runs, so that it reads no prompt twice.

`FOLDER/<digest of the tokens>.safetensors` holds the source's content states, and of the target its cache, the
residual streams that the map may read, the queries at some positions and the backbone's output, from which the native
logits of every position follow exactly by the head alone, a hundredth of the numbers for a vocabulary of 150,000.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm

from kvbridge import compat
from kvbridge.attention import queried_backbone
from kvbridge.calibration.staging import stored_dtypes
from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.disk import amount, free_bytes
from kvbridge.errors import UnsupportedModelError, UsageError
from kvbridge.fingerprint import digest
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.processes import process_state
from kvbridge.states import ContentStates

RESIDUAL = "residual."
READ_AGAIN = "and the next run reads the document again"


@dataclass(frozen=True, slots=True)
class Readings:
    """Both models' readings of some documents of equal length.

    Attributes:
        input_ids: the documents.
        source: content states of all layers of the source.
        keys: the target's, as cached.
        values: the target's.
        residual: the target's residual stream at the inputs of some layers.
        queries: of the target, rotated and scaled, at the positions `queried`.
        queried: sorted, of each document's own.
        output: of the target's backbone, from which the head makes logits.
    """

    input_ids: Int[Tensor, "B T"]
    source: ContentStates
    keys: Float[Tensor, "L B H T D"]
    values: Float[Tensor, "L B H T D"]
    residual: dict[int, Float[Tensor, "B T E"]]
    queries: Float[Tensor, "L B H_q Q D"]
    queried: Int[Tensor, "B Q"]
    output: Float[Tensor, "B T E"]

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def _rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, unless a number is beyond its range."""
    rounded = exact.to(dtype)
    return rounded if torch.isfinite(rounded).all() else exact


def require_linear_head(target: KVModel, input_ids: Int[Tensor, "1 T"]) -> None:
    """Refuse a target whose logits are more than one linear map of its backbone's output.

    Raises:
        UnsupportedModelError: they are.
    """
    _, logits = target.prefill(input_ids)
    with torch.no_grad():
        output = compat.run(compat.backbone(target.model), input_ids, compat.empty_cache(target.model))
        made = compat.head_logits(target.model, output.last_hidden_state[:, -1])
    if not torch.allclose(made, logits[:, -1], rtol=1e-2, atol=1e-2):
        raise UnsupportedModelError(
            f"{type(target.model).__name__} does more to its logits than its language-model head, which the kl loss "
            "does not follow; give mapper.residual.kind=none."
        )


@dataclass(frozen=True, slots=True)
class ReadingStore:
    """Readings of documents of one pair, in a folder of their own for what decides them.

    Attributes:
        pair: source and target.
        folder: where they lie.
        streams: layers of the target at whose inputs the residual stream is kept.
        queries: positions whose queries are kept.
        sinks: first positions, which are never among those.
    """

    pair: ModelPair
    folder: Path
    streams: tuple[int, ...]
    queries: int
    sinks: int

    def place(self, tokens: Int[Tensor, "T"]) -> Path:
        """The file of one document."""
        pair = {role: [self.pair.load(role).fingerprint, str(self.pair.dtype(role))] for role in ("source", "target")}
        described = digest([pair, list(self.streams), self.queries, self.sinks])
        return self.folder / described / f"{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:32]}.safetensors"

    def prepare(self, documents: Int[Tensor, "N T"]) -> None:
        """Read what is not on disk yet, one document at a time; a killed run goes on where it was.

        Every process reads a share, and all wait until nothing is missing; they see one file system.

        Raises:
            UsageError: the disk has no room for them, going by the size of the first.
        """
        state = process_state()
        share = documents[state.process_index :: state.num_processes]
        missing = [row for row in share if not self.place(row).exists()]
        if missing:
            require_linear_head(self.pair.target, missing[0][None, :16].to(self.pair.target.device))
        with tqdm(
            total=len(share), initial=len(share) - len(missing), unit="doc", desc="read residual",
            disable=not state.is_main_process,
        ) as bar:  # fmt: skip
            for number, row in enumerate(missing):
                write_tensors(self.place(row), self._read(row), {})
                if number == 0:
                    size = self.place(row).stat().st_size
                    bar.set_description(f"read residual, {amount(size * len(documents))}")
                    self._require_room(size * (len(missing) - 1) * state.num_processes)
                bar.update()
        state.wait_for_everyone()

    def _require_room(self, needed: int) -> None:
        free = free_bytes(self.folder)
        if needed > free:
            raise UsageError(
                f"the readings of the remaining documents take {amount(needed)}, and {self.folder} has "
                f"{amount(free)} free; give fewer mapper.residual.documents, a shorter mapper.residual.block, or "
                "another out=."
            )

    def remove(self, documents: Int[Tensor, "N T"]) -> None:
        """Delete the readings of some documents, and the folders that are empty then."""
        for row in documents:
            self.place(row).unlink(missing_ok=True)
        for folder in (self.place(documents[0]).parent, self.folder):
            with suppress(OSError):
                folder.rmdir()

    def positions(self, tokens: Int[Tensor, "T"]) -> Int[Tensor, "Q"]:
        """The positions whose queries are kept: as many after the sinks as there are, in an order of the text's own."""
        seed = int.from_bytes(hashlib.sha256(tokens.numpy().tobytes()).digest()[:7], "little")
        every = torch.randperm(len(tokens) - self.sinks, generator=torch.Generator().manual_seed(seed)) + self.sinks
        return every[: self.queries].sort().values

    def _read(self, tokens: Int[Tensor, "T"]) -> dict[str, Tensor]:
        pair, input_ids = self.pair, tokens[None]
        source = pair.source.content(pair.source.read(input_ids.to(pair.source.device)))
        dtypes = stored_dtypes(pair.source.dtype)
        target, queries = pair.target, list[Tensor]()
        positions = self.positions(tokens)
        backbone = queried_backbone(target.model, lambda query: queries.append(query[0][:, positions.to(query.device)]))
        cache = compat.empty_cache(target.model)
        with torch.no_grad(), compat.residual_streams(target.model, self.streams) as residual:
            output = compat.run(backbone, input_ids.to(target.device), cache).last_hidden_state
        found = [compat.layer_tensors(cache, layer) for layer in range(target.geometry.layers)]
        keys, values = (torch.stack(parts) for parts in zip(*(each for each in found if each), strict=True))
        made = {
            "source_keys": _rounded(source.keys[:, 0], dtypes[0]),
            "source_values": _rounded(source.values[:, 0], dtypes[1]),
            "keys": keys[:, 0],
            "values": values[:, 0],
            "queries": torch.stack(queries),
            "queried": positions,
            "output": output[0],
        }
        made |= {f"{RESIDUAL}{layer}": stream[0] for layer, stream in residual.items()}
        return {name: tensor.detach().cpu() for name, tensor in made.items()}

    def load(self, documents: Sequence[Int[Tensor, "T"]]) -> Readings:
        """Readings of some documents, on the target's device.

        Raises:
            CalibrationError: a file is missing or damaged.
        """
        read: dict[str, list[Tensor]] = {}
        for row in documents:
            path = self.place(row)
            try:
                file = TensorFile(path, READ_AGAIN)
                for name in file.shapes:
                    read.setdefault(name, []).append(file.read(name))
            except (SafetensorError, OSError, ValueError) as error:
                raise damaged(path, error, READ_AGAIN) from error
        device = self.pair.target.device
        # Layers come first in states and queries, documents in what has no layers.
        joined = {
            name: torch.stack(parts, dim=0 if name.startswith((RESIDUAL, "output", "queried")) else 1).to(device)
            for name, parts in read.items()
        }
        return Readings(
            torch.stack(list(documents)).to(device),
            ContentStates(
                joined["source_keys"],
                joined["source_values"],
                torch.arange(len(documents[0]), device=device),
            ),
            joined["keys"],
            joined["values"],
            {int(n.removeprefix(RESIDUAL)): stream for n, stream in joined.items() if n.startswith(RESIDUAL)},
            joined["queries"],
            joined["queried"],
            joined["output"],
        )

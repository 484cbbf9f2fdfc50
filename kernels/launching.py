"""Maps compiled for the Triton kernels, and the operator that runs them. Needs the extra `triton`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from torch.library import custom_op

from kvbridge.forms import Form, SlotAffine
from kvbridge.kernels.capability import product_dtype
from kvbridge.kernels.packed import Gathered, read_by
from kvbridge.kernels.triton import Pages, Program, Side, Tables, compile_map, run
from kvbridge.kernels.triton.gather import TYPES
from kvbridge.kernels.triton.pages import odd_one
from kvbridge.kernels.triton.sides import has_one_angle_per_pair
from kvbridge.kernels.writing import Source, refuse_unusable, require_read
from kvbridge.rotary import RotaryCodec
from kvbridge.states import CachedStates, ContentStates

# An operator takes tensors and numbers, so a program goes by its number; whoever compiled it keeps it alive.
_PROGRAMS: WeakValueDictionary[int, Program] = WeakValueDictionary()
_NUMBERS = itertools.count()


@custom_op(
    "kvbridge::run_program",
    mutates_args={"destination"},
    schema="(int program, Tensor[] keys, Tensor[] values, Tensor[] native_keys, Tensor[] native_values, "
    "Tensor[] streams, Tensor tables, int target_tables, Tensor(a!) destination) -> Tensor",
)
def run_program(
    program: int,
    keys: list[Tensor],
    values: list[Tensor],
    native_keys: list[Tensor],
    native_values: list[Tensor],
    streams: list[Tensor],
    tables: Float[Tensor, "numbers"],
    target_tables: int,
    destination: Float[Tensor, "2 L B H T D"],
) -> Float[Tensor, "N E"]:
    """Map a source's cache into a target's: the launches of `kvbridge.kernels.triton.run`.

    Args:
        program: number of the compiled map.
        keys: of each layer of the source, `[B, H, T, D]`.
        values: of each layer.
        native_keys: content keys of the target's first layers, where the map reads them.
        native_values: values of the same.
        streams: residual streams `[B · T, E]` of the layers that the map reads, in order.
        tables: as `Tables.flat`.
        target_tables: where the target's part begins.
        destination: to be written; any strides, but the last is 1.

    Returns:
        The residual stream at the input of the layer after the last; of width 0 where the map makes none.
    """
    compiled = _PROGRAMS[program]
    made = run(
        compiled,
        Pages.of(keys, values),
        Pages.of(list(destination[0]), list(destination[1])),
        Tables(tables, keys[0].shape[-2], target_tables),
        native=Pages.of(native_keys, native_values) if native_keys else None,
        streams=dict(zip(compiled.reads_streams, streams, strict=True)),
    )
    return next(iter(made.values()), destination.new_empty((destination.shape[2] * destination.shape[4], 0)))


@run_program.register_fake
def _(
    program: int,
    keys: list[Tensor],
    values: list[Tensor],
    native_keys: list[Tensor],
    native_values: list[Tensor],
    streams: list[Tensor],
    tables: Tensor,
    target_tables: int,
    destination: Tensor,
) -> Tensor:
    width = next(iter(_PROGRAMS[program].streams.values()), 0)
    return destination.new_empty((destination.shape[2] * destination.shape[4], width))


def register(program: Program) -> int:
    """The number by which `run_program` knows a program, for as long as somebody keeps the program."""
    number = next(_NUMBERS)
    _PROGRAMS[number] = program
    return number


@dataclass(frozen=True, slots=True)
class _Launch:
    """What one compiled map is found by: the target layers, the dtype of the products, and all shapes of rows."""

    layers: range
    dtype: torch.dtype
    source: Side
    target: Side
    native: Side


class LaunchedMap:
    """A map on one device, compiled once for each set of target layers, shapes and dtype.

    Args:
        forms: of the map.
        device: where it is executed.
    """

    def __init__(self, forms: tuple[Form, ...], device: torch.device) -> None:
        self.forms, self.device = forms, device
        self._reads: dict[range, set[Gathered]] = {}
        self._programs: dict[_Launch, tuple[int, Program]] = {}
        self._one_angle: dict[RotaryCodec, bool] = {}

    def suits(
        self,
        source: Source,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec,
        native: ContentStates | None,
    ) -> bool:
        """Whether the kernels can read and write these states; the operators in plain torch take any."""
        own, streams = ([], []) if native is None else ([*native.keys, *native.values], [*native.residual.values()])
        caches = [*source.keys, *source.values], [*destination[0], *destination[1]], own
        dtypes = {tensor.dtype for part in (*caches, streams) for tensor in part}
        if source.tokens == 0 or not dtypes <= TYPES.keys():
            return False
        if any(part and (part[0].stride(-1) != 1 or odd_one(part) is not None) for part in caches):
            return False
        codecs = [rotary, *([source.rotary] if isinstance(source, CachedStates) else [])]
        return all(map(self._turns_pairs_alike, codecs))

    def write(
        self,
        source: Source,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec,
        native: ContentStates | None,
    ) -> dict[int, Float[Tensor, "B T E"]]:
        """Map into the target's cache, as `WritingMap.write` says; a residual stream is rounded once, to its dtype.

        Raises:
            CacheError: the map cannot read the states, or makes numbers that are not finite.
        """
        for gathered in self._read(layers):
            require_read(gathered, source, native)
        codec = source.rotary if isinstance(source, CachedStates) else None
        tables = Tables.of(codec, rotary, source.positions)
        number, program = self._compiled(source, layers, destination, rotary, native, tables)
        own = ([], []) if native is None else (list(native.keys), list(native.values))
        read = [] if native is None else [native.residual[layer].flatten(0, 1) for layer in program.reads_streams]
        made = run_program(
            number, list(source.keys), list(source.values), *own, read, tables.flat, tables.target, destination
        )
        self._require_finite(destination, layers)
        return {layer: made.float().unflatten(0, (destination.shape[2], -1)) for layer in program.streams}

    def _turns_pairs_alike(self, codec: RotaryCodec) -> bool:
        if codec not in self._one_angle:
            self._one_angle[codec] = has_one_angle_per_pair(codec, self.device)
        return self._one_angle[codec]

    def _read(self, layers: range) -> set[Gathered]:
        if layers not in self._reads:
            wanted = [form for form in self.forms if isinstance(form, SlotAffine) or form.columns(layers)]
            self._reads[layers] = set(map(read_by, wanted))
        return self._reads[layers]

    def _compiled(
        self,
        source: Source,
        layers: range,
        destination: Tensor,
        rotary: RotaryCodec,
        native: ContentStates | None,
        tables: Tables,
    ) -> tuple[int, Program]:
        turned = [numbers // tables.tokens for numbers in (tables.target, len(tables.flat) - tables.target)]
        pairs = isinstance(source, CachedStates) and source.rotary.interleaved
        _, heads, _, width = source.keys[0].shape
        given = Side(len(source.keys), heads, width, turned[0], pairs, hidden=0)
        made = Side(layers.stop, destination.shape[3], destination.shape[5], turned[1], rotary.interleaved, hidden=0)
        launch = _Launch(layers, product_dtype(destination.dtype, self.device), given, made, _native_side(made, native))
        if launch not in self._programs:
            program = compile_map(
                self.forms, layers, given, made, native=launch.native, dtype=launch.dtype, device=self.device
            )
            self._programs[launch] = register(program), program
        return self._programs[launch]

    def _require_finite(self, destination: Float[Tensor, "2 L B H T D"], layers: range) -> None:
        # A sum in fp32 is not finite where a summand is not, and is read once.
        if not destination.sum(dim=(0, 2, 3, 4, 5), dtype=torch.float32).isfinite().all():
            refuse_unusable(destination, layers, layers)


def _native_side(target: Side, native: ContentStates | None) -> Side:
    """Content states of the target's first layers, and its residual stream where it is known."""
    if native is None:
        return Side(0, target.heads, target.head_dim, 0, False, hidden=0)
    streams = native.residual
    held = max(len(native.keys), *(layer + 1 for layer in streams), 0)
    hidden = next(iter(streams.values())).shape[-1] if streams else 0
    return Side(held, native.keys.shape[2], native.keys.shape[-1], 0, False, hidden)

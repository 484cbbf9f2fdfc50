"""Caches kept between requests, within a memory cap; what is exact and what was mapped never share an entry.

kind      key                                                   found by
exact     source or target, dtype                               the longest common beginning of the tokens
sinks     target, dtype                                         the plan's first tokens, all of them
mapped    target, dtype, source, its revision, bridge and plan  the longest entry that the tokens begin with
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import RLock

from transformers import DynamicCache

from kvbridge import compat
from kvbridge.cascade.memory import Memory, common_length, shared_cache
from kvbridge.errors import CacheError, UsageError
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class ExactKey:
    """Whose own reading an entry is.

    Attributes:
        model: fingerprint.
        dtype: that it computes in.
        sinks: the entry is the first tokens of prompts alone.
    """

    model: str
    dtype: str
    sinks: bool = False

    @classmethod
    def of(cls, model: KVModel, *, sinks: bool = False) -> ExactKey:
        return cls(model.fingerprint, str(model.dtype), sinks)


@dataclass(frozen=True, slots=True)
class MappedKey:
    """From what and for whom an entry was mapped.

    Attributes:
        target: fingerprint.
        dtype: that it computes in.
        source: fingerprint.
        revision: of the source, where it has one.
        bridge: fingerprint, and the name of the map in it.
        plan: of the hand-off.
    """

    target: str
    dtype: str
    source: str
    revision: str | None
    bridge: str
    plan: HandoffPlan


Key = ExactKey | MappedKey


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache and the tokens that it holds."""

    tokens: tuple[int, ...]
    cache: DynamicCache
    size: int


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of a cache's keys and values."""
    found = (compat.layer_tensors(cache, layer) for layer in range(len(cache.layers)))
    return sum(tensor.numel() * tensor.element_size() for pair in found if pair is not None for tensor in pair)


class StateStore:
    """Caches by what they were made from; the one that was not used for longest goes first.

    Args:
        max_bytes: of all entries together.

    Attributes:
        hits: times that an entry was taken.
        misses: times that none was of use.
        evictions: entries that had to make room.
        refused: entries dropped since what went on from them was refused.

    Raises:
        UsageError: the cap is negative.
    """

    def __init__(self, max_bytes: int = 2**28) -> None:
        if max_bytes < 0:
            raise UsageError(f"StateStore(max_bytes={max_bytes}): give 0 or more bytes.")
        self.max_bytes = max_bytes
        self.hits = self.misses = self.evictions = self.refused = 0
        self._entries: OrderedDict[tuple[Key, tuple[int, ...]], Entry] = OrderedDict()
        self._bytes = 0
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What all entries take."""
        return self._bytes

    def counts(self) -> dict[str, int]:
        """What the store holds and what became of it, as JSON values."""
        counted = {name: getattr(self, name) for name in ("hits", "misses", "evictions", "refused")}
        return {"entries": len(self), "bytes": self.bytes} | counted

    def names(self) -> list[tuple[Key, tuple[int, ...]]]:
        """Key and tokens of every entry, the one that was not used for longest first."""
        with self._lock:
            return list(self._entries)

    def keep(self, key: Key, memory: Memory) -> None:
        """Keep what a memory holds.

        Raises:
            CacheError: the memory's cache was mapped and the key is that of exact ones, or the other way round.
        """
        if memory.approximate != isinstance(key, MappedKey):
            kind = "a mapped" if memory.approximate else "an exact"
            raise CacheError(f"{kind} cache does not belong under {type(key).__name__}; the two are never mixed.")
        self._put(key, tuple(memory.tokens), shared_cache(memory.model, memory.cache))

    def keep_sinks(self, memory: Memory, sinks: int) -> None:
        """Keep the first tokens that a target read itself after a hand-off; nothing mapped comes before them."""
        key = ExactKey.of(memory.model, sinks=True)
        tokens = tuple(memory.tokens[:sinks])
        if sinks and len(tokens) == sinks and (key, tokens) not in self._entries:
            # Only a copy lets go of the rest.
            self._put(key, tokens, compat.copy_cache(memory.cache, memory.model.model, sinks))

    def resume(self, key: Key, tokens: Sequence[int], memory: Memory) -> None:
        """Give a memory the entry that helps most with `tokens`, where that is more than it holds itself."""
        self._resume(key, tuple(tokens), memory, None)

    def resume_sinks(self, tokens: Sequence[int], memory: Memory, sinks: int) -> None:
        """Give an empty memory the first `sinks` tokens."""
        if 0 < sinks < len(tokens):
            self._resume(ExactKey.of(memory.model, sinks=True), tuple(tokens), memory, sinks)

    def refuse(self, memory: Memory) -> bool:
        """Drop the entry that a memory goes on from, since it led to nothing usable, and all that the memory holds.

        Returns:
            Whether it goes on from one; if not, nothing is done.
        """
        if memory.origin is None:
            return False
        with self._lock:
            self.refused += memory.origin in self._entries
            self._drop(memory.origin)
        memory.reset()
        return True

    def _resume(self, key: Key, tokens: tuple[int, ...], memory: Memory, length: int | None) -> None:
        held = memory.align(tokens)
        with self._lock:
            useful, best = max(self._matching(key, tokens, length), default=(0, ()))
            if useful <= held:
                self.misses += 1
                return
            self.hits += 1
            self._entries.move_to_end((key, best))
            entry = self._entries[key, best]
        shared = shared_cache(memory.model, entry.cache)
        memory.adopt(entry.tokens, shared, approximate=isinstance(key, MappedKey), origin=(key, best))
        memory.align(tokens)

    def _matching(self, key: Key, tokens: tuple[int, ...], length: int | None) -> Iterator[tuple[int, tuple[int, ...]]]:
        """How many tokens each entry of a key is good for, and what the entry is called."""
        for owner, held in self.names():
            if owner != key or (length is not None and len(held) != length):
                continue
            whole = len(held) < len(tokens) and tokens[: len(held)] == held
            if whole:
                yield len(held), held
            elif isinstance(key, ExactKey) and not key.sinks:
                yield common_length(held, tokens), held

    def _put(self, key: Key, tokens: tuple[int, ...], cache: DynamicCache) -> None:
        entry = Entry(tokens, cache, cache_bytes(cache))
        if not tokens or entry.size > self.max_bytes:
            return
        with self._lock:
            self._drop((key, tokens))
            self._entries[key, tokens] = entry
            self._bytes += entry.size
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
                self.evictions += 1

    def _drop(self, name: tuple[Key, tuple[int, ...]]) -> None:
        entry = self._entries.pop(name, None)
        self._bytes -= entry.size if entry is not None else 0

"""Errors a user can act on. Each message says what was given, what was expected and what to do."""


class KVBridgeError(Exception):
    """Base of every error that kvbridge raises on purpose; the command line prints it and exits with code 2."""


class UsageError(KVBridgeError):
    """An option, path or combination of options that cannot work."""


class UnsupportedModelError(KVBridgeError):
    """A model whose KV cache kvbridge cannot carry faithfully."""


class PairMismatchError(KVBridgeError):
    """Two things that must describe the same pair of models do not."""


class PlanError(KVBridgeError):
    """A hand-off plan that does not fit the target or the prompt."""


class CacheError(KVBridgeError):
    """A cache or content states whose shape, length, dtype or values are wrong."""


class CorpusError(KVBridgeError):
    """Text that is missing, unreadable or too short."""


class CalibrationError(KVBridgeError):
    """Moments that cannot be resumed, merged or fitted."""


class TrainingError(KVBridgeError):
    """A training that diverged, or a checkpoint that does not belong to it."""


class ArtifactError(KVBridgeError):
    """A bridge folder that is damaged, incomplete, too new or not a bridge."""

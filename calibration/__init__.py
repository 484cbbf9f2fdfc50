"""Text through both models into moments: corpora, streaming collection, mergeable sums."""

from kvbridge.calibration.collect import calibrate
from kvbridge.calibration.config import CalibrationConfig
from kvbridge.calibration.corpus import Corpus, CorpusConfig, open_corpus
from kvbridge.calibration.moments import CalibrationMoments, MomentBlock, Moments
from kvbridge.calibration.store import calibrate_once, moments_folder

__all__ = [
    "CalibrationConfig",
    "CalibrationMoments",
    "Corpus",
    "CorpusConfig",
    "MomentBlock",
    "Moments",
    "calibrate",
    "calibrate_once",
    "moments_folder",
    "open_corpus",
]

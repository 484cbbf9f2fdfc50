"""Text through both models into moments: corpora, streaming collection, mergeable sums."""

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments, load_of_bridge
from kvbridge.calibration.attention import ATTENTION, AttentionMetric
from kvbridge.calibration.collect import calibrate
from kvbridge.calibration.config import CalibrationConfig, differing_settings
from kvbridge.calibration.corpus import Corpus, CorpusConfig, open_corpus
from kvbridge.calibration.moments import Moments
from kvbridge.calibration.novelty import fit_novelty
from kvbridge.calibration.products import MomentBlock, joint_blocks
from kvbridge.calibration.shapes import ModelShape, model_shape
from kvbridge.calibration.sizes import CalibrationSizes, SizeSettings, calibration_sizes, sizes_table
from kvbridge.calibration.sketch import Sketch
from kvbridge.calibration.store import calibrate_once, moments_folder

__all__ = [
    "ATTENTION",
    "MOMENTS",
    "AttentionMetric",
    "CalibrationConfig",
    "CalibrationMoments",
    "CalibrationSizes",
    "Corpus",
    "CorpusConfig",
    "ModelShape",
    "MomentBlock",
    "Moments",
    "SizeSettings",
    "Sketch",
    "calibrate",
    "calibrate_once",
    "calibration_sizes",
    "differing_settings",
    "fit_novelty",
    "joint_blocks",
    "load_of_bridge",
    "model_shape",
    "moments_folder",
    "open_corpus",
    "sizes_table",
]

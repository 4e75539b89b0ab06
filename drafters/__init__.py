"""Drafters of speculative decoding: modules, batches and losses (torch only; no Ray, no input or output)."""

from drafters.anchors import sample_anchors
from drafters.backbone import ContextCache
from drafters.batch import SampleTensors, TrainBatch, pack
from drafters.config import DrafterConfig, config_from_target
from drafters.drafter import Drafter, Metrics
from drafters.errors import DrafterError
from drafters.family import TargetFamily, family_of
from drafters.heads import SequentialHead
from drafters.losses import LossWeights, default_loss_weights
from drafters.target_head import TargetHead

__all__ = [
    "ContextCache",
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "LossWeights",
    "Metrics",
    "SampleTensors",
    "SequentialHead",
    "TargetFamily",
    "TargetHead",
    "TrainBatch",
    "config_from_target",
    "default_loss_weights",
    "family_of",
    "pack",
    "sample_anchors",
]

"""Modules that own parameters: attention with mixture keys, its decode caches, and transformer layers around it."""

from mgk.nn.attention import MixtureAttention
from mgk.nn.block import Block, Stack
from mgk.nn.cache import KeyValueCache, StackCache, StateCache
from mgk.nn.embeddings import RotaryPositions, RotaryScaling, Rotation, SinusoidalPositions
from mgk.nn.norm import RMSNorm
from mgk.nn.operators import AttentionInputs
from mgk.nn.output import TiedSoftmax
from mgk.nn.pages import PagedCache
from mgk.nn.replace import replace_attention

__all__ = [
    "AttentionInputs",
    "Block",
    "KeyValueCache",
    "MixtureAttention",
    "PagedCache",
    "RMSNorm",
    "RotaryPositions",
    "RotaryScaling",
    "Rotation",
    "SinusoidalPositions",
    "Stack",
    "StackCache",
    "StateCache",
    "TiedSoftmax",
    "replace_attention",
]

"""Modules that own parameters: attention with mixture keys and its decode caches."""

from mgk.nn.attention import MixtureAttention
from mgk.nn.cache import KeyValueCache, StateCache

__all__ = ["KeyValueCache", "MixtureAttention", "StateCache"]

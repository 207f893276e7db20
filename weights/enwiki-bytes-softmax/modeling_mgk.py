"""Loads mgk, which must be installed: pip install 'mgk[hf]'."""

from mgk.hf import *  # noqa: F403

"""Look inside: collect what attention does, and put it into numbers, figures and tables."""

from mgk.analysis.collect import Layer, collect
from mgk.analysis.costs import Curve, cost_curves
from mgk.analysis.heads import Dense, Factors, Head, Rows
from mgk.analysis.inertia import rank, ranks
from mgk.analysis.summary import Summary, effective_number, separation, summarise

__all__ = [
    "Curve",
    "Dense",
    "Factors",
    "Head",
    "Layer",
    "Rows",
    "Summary",
    "collect",
    "cost_curves",
    "effective_number",
    "rank",
    "ranks",
    "separation",
    "summarise",
]

"""Look inside: collect what attention does, and put it into numbers, figures and tables."""

from mgk.inspect.collect import Layer, collect
from mgk.inspect.costs import Curve, cost_curves
from mgk.inspect.heads import Dense, Factors, Head, Rows
from mgk.inspect.page import Chart, Model, Page, Series, Table, Text, byte_tokens, page, write
from mgk.inspect.rank import rank, ranks
from mgk.inspect.summary import Summary, effective_number, separation, summarise

__all__ = [
    "Chart",
    "Curve",
    "Dense",
    "Factors",
    "Head",
    "Layer",
    "Model",
    "Page",
    "Rows",
    "Series",
    "Summary",
    "Table",
    "Text",
    "byte_tokens",
    "collect",
    "cost_curves",
    "effective_number",
    "page",
    "rank",
    "ranks",
    "separation",
    "summarise",
    "write",
]

"""Look inside the attention of a model: numbers, figures and an HTML page.

- `collect.py` runs a model and records the queries, keys and priors of its attention layers.
- `heads.py` computes the weights and responsibilities of one head from them.
- `summary.py`, `rank.py` and `costs.py` compute statistics of heads, ranks of attention matrices, FLOPs and parameters.
- `figures.py` draws the paper's figures from plain arrays (needs matplotlib).
- `page.py` writes the explorer, one HTML file; `blocks.py` has the parts of a report above it, `pack.py` embeds its
  arrays, `assets/` has its JavaScript and CSS.
- `runs.py` opens folders of `mgk train`, `tokens.py` converts text to their inputs, and `report.py` puts all of this
  together for `mgk figures` and `mgk explore`.
"""

from mgk.inspect.blocks import Bar, Bars, Chart, Series, Text
from mgk.inspect.collect import Layer, collect
from mgk.inspect.costs import Curve, cost_curves
from mgk.inspect.heads import Dense, Factors, Head, Rows
from mgk.inspect.page import Answer, Model, Page, page, write
from mgk.inspect.rank import rank, ranks
from mgk.inspect.summary import Summary, effective_number, separation, summarise
from mgk.inspect.tokens import byte_tokens
from mgk.tables import Table

__all__ = [
    "Answer",
    "Bar",
    "Bars",
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

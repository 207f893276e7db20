"""One self-contained page on which anyone can look inside mixture-key attention: no server, no network."""

from mgk.explorer.document import Chart, Model, Page, Series, Table, Text, byte_tokens, page, write

__all__ = ["Chart", "Model", "Page", "Series", "Table", "Text", "byte_tokens", "page", "write"]

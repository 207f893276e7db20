"""One hypothesis profile for all tests: the same examples on every machine, and no clock."""

from hypothesis import settings

settings.register_profile("repeatable", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

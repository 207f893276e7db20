"""Benchmarks of kernels and full models, against the baselines a user would pick instead.

Run from a checkout: `python -m benchmarks.NAME`, where NAME is attention, training, train, generate, merging, tune or
plot.
"""

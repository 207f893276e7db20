"""The study of experiments/PLAN.md: does a mixture of keys pay, against what a user would pick otherwise?

python -m experiments.lm --plan    what remains
"""

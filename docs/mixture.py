"""Draws docs/mixture.png, what one head can look at when its keys are mixtures. Run it from the repository's root."""

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

import mgk

mpl.use("Agg")
BLUE, ORANGE, GREY = "#3b6ea8", "#d9772b", "#8a8a8a"
TOKENS, QUERY, KEY, VARIANCE = 24, 12, 9, 0.02

torch.manual_seed(4)
place = torch.linspace(-1, 1, TOKENS)
tokens = torch.stack([place, 0.25 * torch.sin(3 * place)], -1)
query = (tokens + 0.02 * torch.randn(TOKENS, 2))[None, None]  # (B,H,N,D)
key = tokens[None, None]
one = torch.tensor([[[-0.35, 0.0]]])  # shift (H,M,D)
two = torch.tensor([[[-0.35, 0.0], [0.45, 0.1]]])

figure, (plane, left, right) = plt.subplots(1, 3, figsize=(11, 3.7), width_ratios=[1.25, 1, 1], layout="constrained")

grid = torch.linspace(-1.5, 1.5, 200)
x, y = torch.meshgrid(grid, grid * 0.6, indexing="xy")
centres = key[0, 0, KEY] + two[0]
density = sum(torch.exp(-((x - c[0]) ** 2 + (y - c[1]) ** 2) / (2 * VARIANCE)) for c in centres)
plane.contourf(x, y, density, levels=[0.1 * level for level in range(1, 11)], cmap="Oranges", alpha=0.6)
plane.plot(*tokens.T, ".", color=GREY, label="keys $k_j$")
for centre in centres:
    plane.annotate("", centre, key[0, 0, KEY], arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 1.5})
plane.plot(*centres.T, "o", color=ORANGE, label="one key's mixture, $k_j + b_r$")
plane.plot(*query[0, 0, QUERY], "*", color=BLUE, markersize=13, label="a query $q_i$")
plane.set(
    title="a key is a mixture of Gaussians", xticks=[], yticks=[], xlim=(-1.1, 1.1), ylim=(-0.75, 0.5), aspect="equal"
)
plane.legend(loc="upper left", fontsize=8, frameon=False)

titles = "one Gaussian per key: one pattern", "two: both patterns in one head"
for axes, shift, title in zip((left, right), (one, two), titles, strict=True):
    weights = mgk.attention_weights(query, key, shift=shift, variance=VARIANCE)[0, 0]
    axes.imshow(weights, cmap="Oranges", vmin=0, vmax=0.25)
    axes.axhline(QUERY, color=BLUE, lw=0.8)
    axes.set(title=title, xlabel="key $j$", ylabel="query $i$", xticks=[], yticks=[])

for axes in (plane, left, right):
    axes.title.set_fontsize(10)
figure.savefig("docs/mixture.png", dpi=130)

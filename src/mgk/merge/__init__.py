"""Head merging: half the heads of a trained softmax model, as mixture-key heads."""

"""How good a model is, with intervals, and whether it is better than another: --eval."""

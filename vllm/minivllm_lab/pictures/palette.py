"""One palette for every figure and widget: Okabe and Ito's, readable with any colour vision."""

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
GREY = "#999999"
PALE = "#E8E8E8"
INK = "#222222"

SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GREY)
"""Colours for numbered things, in the order to use them."""

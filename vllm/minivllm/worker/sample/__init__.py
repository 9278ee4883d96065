"""The sampler, which turns logits into tokens: penalties, biases, truncation, the random draw, log
probabilities.
"""

"""The lessons' opening figures: each module draws one mechanism on the followed request, step by step."""

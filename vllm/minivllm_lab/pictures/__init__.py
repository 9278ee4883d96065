"""Pictures: colours, shapes as SVG, stills that make an animation, plots, and the request that all pictures follow."""

"""Provide what all widgets share, from colours and shapes up to the anywidget that displays them."""

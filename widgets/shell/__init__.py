"""Share what all widgets need, from colours and shapes up to the anywidget that carries them."""

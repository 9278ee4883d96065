"""What all widgets share, from colours and shapes up to the anywidget that carries them."""

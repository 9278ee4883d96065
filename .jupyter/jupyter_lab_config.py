"""JupyterLab as `make lab` starts it: it opens on the list of notebooks, and messages of a
kernel leave at once.
"""

from __future__ import annotations

import asyncio

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection


class AtOnce(ZMQChannelsWebsocketConnection):
    """A kernel's websocket without Nagle's algorithm.

    A turned knob is answered by two messages: the kernel is busy, and the picture. The second
    waited until the browser had acknowledged the first, which Linux puts off by up to 40 ms.
    """

    def connect(self) -> asyncio.Future[None] | None:
        """Join the kernel's channels."""
        self.websocket_handler.set_nodelay(True)
        return super().connect()


c = get_config()  # noqa: F821  (Jupyter hands it to this file)
c.LabApp.default_url = "/lab/tree/notebooks/README.md"
c.ServerApp.kernel_websocket_connection_class = AtOnce

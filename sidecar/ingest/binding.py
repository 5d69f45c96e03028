"""A ZMQ socket that the service binds."""

from __future__ import annotations

from pathlib import Path

import zmq

from capture_kernels.errors import OptionError
from pipeline.stream.curve import server_keys


class Bound:
    """A socket with a context and, given keys, an authenticator; `close` ends all three.

    Args:
        kind: zmq.PULL or zmq.PUB.
        option: that gave the address, for errors.
        address: to bind to; port 0 or * takes a free one.
        curve_keys: a folder of `attn stream keys`; only its clients may connect.
        settings: further socket options, set before it is bound.

    Attributes:
        address: that it is bound to.

    Raises:
        OptionError: the address cannot be bound, or the keys cannot be read.
    """

    def __init__(
        self,
        kind: int,
        option: str,
        address: str,
        curve_keys: Path | None,
        settings: dict[zmq.SocketOption, int],
    ) -> None:
        keys = server_keys(curve_keys) if curve_keys else None
        self._context = zmq.Context()
        self._authenticator = None
        self.socket = self._context.socket(kind)
        try:
            for setting, value in {zmq.LINGER: 0, **settings}.items():
                self.socket.setsockopt(setting, value)
            if "[" in address:
                self.socket.setsockopt(zmq.IPV6, 1)
            if keys:
                self._authenticator = keys.authenticator(self._context)
                keys.apply(self.socket)
            self.socket.bind(address.replace("localhost", "127.0.0.1"))
        except zmq.ZMQError as error:
            self.close()
            raise OptionError(
                f"cannot bind {option} {address}: {error.strerror}; choose another address"
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        if self._authenticator:
            self._authenticator.stop()
        self.socket.close()
        self._context.term()

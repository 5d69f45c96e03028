"""CURVE keys of the stream: who may send, and who may be sent to, off this machine (CurveZMQ).

A folder has one pair of keys of the receiver, `server`, and one of each sender, `client` or another
name: NAME.key (public) and NAME.key_secret. The receiver needs all but the senders' secrets, and
lets in who holds a secret whose public key is in its folder; a sender needs server.key and its own
pair.
"""

from __future__ import annotations

import logging
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from capture_kernels.errors import MissingExtraError, OptionError, WriteError

LOG = logging.getLogger("attn.stream")
SERVER, CLIENT = "server", "client"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class ServerKeys(NamedTuple):
    """A receiver's key pair, each 40 characters of Z85, and the folder of who may send to it."""

    public: bytes
    secret: bytes
    folder: Path

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is yet to be bound take CURVE connections only. Its context needs an
        `authenticator`: without one ZMQ lets in anybody who knows the public key."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """A started thread that lets in the senders whose public keys are in the folder as they
        connect. Make it before the socket is bound; end it by `stop()`."""
        authenticator = ThreadAuthenticator(context)
        authenticator.configure_curve_callback("*", _Senders(self.folder))
        authenticator.start()
        return authenticator


class _Senders(NamedTuple):
    """Who may connect, as pyzmq's authenticator asks it: a public key may come or go meanwhile."""

    folder: Path

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key`, in Z85, is a sender's in the folder. Raises nothing: that would end the
        thread that asks."""
        for path in self.folder.glob("*.key"):
            try:
                if path.stem != SERVER and _load(path)[0] == key:
                    return True
            except OptionError as error:
                LOG.warning("%s", error)
        return False


class ClientKeys(NamedTuple):
    """A sender's key pair and the receiver's public key, each 40 characters of Z85."""

    public: bytes
    secret: bytes
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is yet to be connected speak CURVE."""
        socket.curve_serverkey = self.server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


def make_keys(folder: Path, client: str = CLIENT) -> list[Path]:
    """Make the pairs `server` and `client` that `folder` does not have; returns the new files.

    Args:
        folder: is made too, for its owner only (0700).
        client: name of the sender's pair.

    Raises:
        OptionError: the name is taken, or cannot be a file name.
        MissingExtraError: this ZMQ library was built without CURVE.
        WriteError: the files cannot be written.
    """
    if not zmq.has("curve"):
        raise MissingExtraError("this ZMQ library has no CURVE: install pyzmq from its wheel")
    if not _NAME.fullmatch(client) or client == SERVER:
        raise OptionError(f"a sender cannot be called {client!r}: use letters, digits, - and _")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _exists(folder, client):
            raise OptionError(f"{folder} has keys of {client!r}: give another --client")
        names = [client] if _exists(folder, SERVER) else [SERVER, client]
        return [made for name in names for made in _make_pair(folder, name)]
    except OSError as error:
        raise WriteError(f"cannot write keys to {folder} ({error.strerror})") from None


def _exists(folder: Path, name: str) -> bool:
    return any((folder / f"{name}.{kind}").exists() for kind in ("key", "key_secret"))


def _make_pair(folder: Path, name: str) -> list[Path]:
    # pyzmq writes with the process's own mask: the secret must not be readable for a moment.
    for kind in ("key", "key_secret"):
        os.close(os.open(folder / f"{name}.{kind}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return [Path(made) for made in create_certificates(folder, name)]


def server_keys(folder: Path) -> ServerKeys:
    """The receiver's keys.

    Raises:
        OptionError: they are missing, damaged, or readable by others; says what to do.
    """
    public, secret = _pair(folder, SERVER)
    return ServerKeys(public, secret, folder)


def client_keys(folder: Path, client: str = CLIENT) -> ClientKeys:
    """A sender's keys. Raises OptionError as `server_keys`."""
    public, secret = _pair(folder, client)
    return ClientKeys(public, secret, _load(folder / f"{SERVER}.key")[0])


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _load(path)
    if secret is None:
        raise OptionError(f"{path} has no secret key: give a whole copy of it")
    if path.stat().st_mode & 0o077:
        raise OptionError(f"{path} can be read by others: chmod 600 {path}")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
        for key in (public, secret or public):
            if len(key) != 40 or len(z85.decode(key)) != 32:
                raise ValueError
    except OSError as error:
        if path.exists():
            raise OptionError(f"{path} cannot be read ({error.strerror})") from None
        raise OptionError(
            f"{path} does not exist: make keys with `attn stream keys {path.parent}`, or copy it"
        ) from None
    # What `z85.decode` makes of other characters.
    except (ValueError, KeyError, UnicodeDecodeError):
        raise OptionError(f"{path} holds no CURVE key: give a whole copy of it") from None
    return public, secret


def check_address(address: str, *, has_keys: bool) -> None:
    """OptionError if ZMQ cannot have this address, or if it leaves this machine without keys.

    Args:
        address: tcp://HOST:PORT, ipc://PATH or inproc://NAME.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    right = {
        "tcp": bool(host) and (port == "*" or (port.isdecimal() and int(port) < 1 << 16)),
        "ipc": bool(rest),
        "inproc": bool(rest),
    }
    if not right.get(scheme):
        raise OptionError(f"{address!r} is no address: use tcp://HOST:PORT or ipc://PATH")
    if scheme == "tcp" and not has_keys and not is_loopback(host):
        raise OptionError(
            f"{address} is not on this machine alone: give --curve-keys DIR (`attn stream keys DIR`"
            " makes them)"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address, which may be in brackets, is this machine's alone."""
    try:
        return host.lower() == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

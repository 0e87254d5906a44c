"""Which address of a node others reach."""

import fcntl
import socket
import struct

from draftstates.errors import UserError

_SIOCGIFADDR = 0x8915


def own_address(*, interface: str | None, peer: str) -> str:
    """IPv4 address of this node: the one of `interface`, else the one by which it reaches the host `peer`.

    Raises:
        UserError: there is none, or only one that no other node reaches.
    """
    if interface:
        return _interface_address(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # nothing is sent: this only asks for a route
        except OSError as error:
            raise UserError(f"{socket.gethostname()} does not reach {peer}: {error}; set server.slurm.interface") from error
        address = probe.getsockname()[0]
    if address.startswith("127.") and peer != socket.gethostname():
        raise UserError(f"{socket.gethostname()} takes {peer} for itself ({address}); set server.slurm.interface")
    return address


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UserError(
                f"server.slurm.interface: {interface} has no IPv4 address on {socket.gethostname()} ({error.strerror}); found {names}"
            ) from error
    return socket.inet_ntoa(found[20:24])

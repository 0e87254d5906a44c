"""The address by which other nodes reach this node."""

import fcntl
import socket
import struct

from draftstates.errors import UserError

_SIOCGIFADDR = 0x8915


def own_address(*, interface: str | None, peer: str) -> str:
    """Return the IPv4 address of this node.

    Args:
        interface: network interface of the address; None for the interface that leads to `peer`.
        peer: name of a host that this node must reach.

    Raises:
        UserError: this node has no such address, or only one that other nodes do not reach.
    """
    if interface:
        return _interface_address(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # this call sends nothing: it only asks for a route
            probe.connect((peer, 9))
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} does not reach {peer}: {error}; set server.slurm.interface"
            ) from error
        address = probe.getsockname()[0]
    if address.startswith("127.") and peer != socket.gethostname():
        raise UserError(
            f"{socket.gethostname()} takes {peer} for itself ({address}); set"
            " server.slurm.interface"
        )
    return address


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UserError(
                f"server.slurm.interface: {interface} has no IPv4 address on {socket.gethostname()}"
                f" ({error.strerror}); found {names}"
            ) from error
    return socket.inet_ntoa(found[20:24])

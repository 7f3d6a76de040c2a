"""Addresses to listen on: names, and numbers of IPv4 or IPv6. For the server and the gateway."""

import socket


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is a number of IPv6, such as ``::1``."""
    return ":" in host


def family_of(host: str) -> socket.AddressFamily:
    """The family of the socket that listens on ``host``."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def before_port(host: str) -> str:
    """``host`` as it stands before a port: a number of IPv6 in brackets."""
    return f"[{host}]" if is_ipv6(host) else host

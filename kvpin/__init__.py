"""kvpin: guaranteed prefix caching (`cache_control`) for self-hosted LLM engines."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["Client", "__version__"]

if TYPE_CHECKING:
    from kvpin.client import Client


def __getattr__(name: str) -> object:
    # Lazy: engines import kvpin.keys or kvpin.protocol in processes that never open a socket.
    if name == "Client":
        from kvpin.client import Client

        return Client
    raise AttributeError(name)

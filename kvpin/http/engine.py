"""What the HTTP side needs of an engine: to render and tokenise a request as the engine itself will."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvpin.http.places import Dialect


class Rendered(msgspec.Struct, frozen=True):
    """A request as the model will see it.

    `text`: the whole prompt, None if the engine has none. `ends`: where each token ends, in characters of `text` (never
    falling), None if that isn't known.
    """

    token_ids: Sequence[int]
    text: str | None
    ends: Sequence[int] | None


class RenderError(Exception):
    """The engine can't render the request. The text is the engine's own reason."""


class Engine(Protocol):
    """Bodies are free of markers. They may be altered ones, so they must not be kept."""

    block_tokens: int  # unit of protection
    protects: bool  # does the engine read the side field? If not, markers are taken out and that's all

    async def render(self, dialect: Dialect, body: dict[str, Any]) -> Rendered:
        """With the very calls that serve a request. Raises RenderError."""

    async def render_text(self, dialect: Dialect, body: dict[str, Any]) -> str:
        """`Rendered.text` alone, which is far cheaper. Raises RenderError."""

    def scope(self, body: dict[str, Any]) -> str:
        """What separates equal tokens: model, adapter, salt."""

    def default_model(self) -> str:
        """For requests to kvpin's own routes that name none."""

    def error(self, dialect: Dialect, status: int, message: str) -> dict[str, Any]:
        """The body of an error as the engine answers it in that dialect."""

"""Which prefixes a request to /v1/cache/evict means: by id, label, token ids, or by messages as they were sent."""

import copy
from typing import Any

import msgspec

from kvpin.calls import expect
from kvpin.client import Client
from kvpin.http.asking import ask
from kvpin.http.engine import Engine
from kvpin.http.markers import parse
from kvpin.http.offsets import locate
from kvpin.http.places import Dialect, strip
from kvpin.keys import PREFIX_ID_BYTES, prefix_ids
from kvpin.limits import LIST_LIMIT_MAX, PREFIXES_MAX, TTL_MS_MAX
from kvpin.protocol import ListPrefixes, Prefixes, PrefixInfo

SELECTORS = ("messages", "token_ids", "prefixes", "label")


class BadRequest(Exception):
    """Answer 400; the text says what to change."""


class Selector(msgspec.Struct, frozen=True):
    """Finds prefixes for one request. Asking the master raises KvpinError."""

    engine: Engine
    client: Client
    timeout_ms: float

    async def select(self, body: dict[str, Any]) -> list[bytes]:
        """The ids that the body's one selector means. Raises BadRequest, RenderError."""
        given = [name for name in SELECTORS if body.get(name) is not None]
        if len(given) != 1:
            raise BadRequest(f"give exactly one of {', '.join(SELECTORS)}; got {', '.join(given) or 'none of them'}")
        match given[0]:
            case "messages":
                return await self._by_messages(body)
            case "token_ids":
                return await self._leading_runs(self._scope(body), token_ids_of(body["token_ids"]))
            case "prefixes":
                return prefix_ids_of(body["prefixes"])
        if not isinstance(body["label"], str) or not body["label"]:
            raise BadRequest("label must be a text, not empty")
        return [prefix.prefix_id for prefix in await self.live(label=body["label"])]

    async def live(self, label: str = "") -> list[PrefixInfo]:
        """All live prefixes, by id."""
        found: list[PrefixInfo] = []
        for _ in range(PREFIXES_MAX // LIST_LIMIT_MAX + 1):
            question = ListPrefixes(label=label, after=found[-1].prefix_id if found else b"")
            page = expect(await ask(self.client, question, self.timeout_ms), Prefixes).prefixes
            found += page
            if len(page) < LIST_LIMIT_MAX:
                break
        return found

    async def _by_messages(self, body: dict[str, Any]) -> list[bytes]:
        """Marked: exactly these prefixes. Unmarked: every live one that the rendered messages begin with."""
        dialect, request = self._as_request(body)
        marked = parse(dialect, request, strict=False, ttl_max_ms=TTL_MS_MAX)
        strip(dialect, request)
        if marked.breakpoints:
            located = await locate(self.engine, dialect, request, marked.breakpoints)
            if not located.prefixes:
                where, reason = located.problems[0]
                raise BadRequest(f"{where}: the end of this block can't be found in the prompt ({reason})")
            return [bytes.fromhex(prefix.id) for prefix in located.prefixes]
        if marked.notes:
            raise BadRequest(marked.notes[0])
        rendered = await self.engine.render(dialect, request)
        return await self._leading_runs(self.engine.scope(request), list(rendered.token_ids))

    async def _leading_runs(self, scope: str, token_ids: list[int]) -> list[bytes]:
        live = await self.live()
        ends = sorted({prefix.end_token for prefix in live if prefix.end_token <= len(token_ids)})
        present = {prefix.prefix_id for prefix in live}
        return [prefix_id for prefix_id in prefix_ids(scope, token_ids, ends) if prefix_id in present]

    def _scope(self, body: dict[str, Any]) -> str:
        return self.engine.scope({"model": self.engine.default_model(), **body})

    def _as_request(self, body: dict[str, Any]) -> tuple[Dialect, dict[str, Any]]:
        """The body as it would be sent to the engine."""
        if not isinstance(body["messages"], list) or not body["messages"]:
            raise BadRequest("messages must be a list with at least one message, as in the request to be evicted")
        default = Dialect.ANTHROPIC if "system" in body else Dialect.OPENAI
        try:
            dialect = Dialect(body.get("dialect", default))
        except ValueError as error:
            raise BadRequest(f"dialect must be one of {', '.join(Dialect)}, not {body['dialect']!r}") from error
        ours = ("dialect", "mode", "dry_run")
        request = {name: value for name, value in copy.deepcopy(body).items() if name not in ours}
        request.setdefault("model", self.engine.default_model())
        request.setdefault("max_tokens", 1)
        return dialect, request


def prefix_ids_of(values: object) -> list[bytes]:
    """Prefix ids from their hex. Raises BadRequest."""
    if not isinstance(values, list) or not values or len(values) > LIST_LIMIT_MAX:
        raise BadRequest(f"prefixes must be a list of 1 to {LIST_LIMIT_MAX} prefix ids")
    return [prefix_id_of(value) for value in values]


def prefix_id_of(value: object) -> bytes:
    """A prefix id from its hex. Raises BadRequest."""
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != PREFIX_ID_BYTES:
        raise BadRequest(f"a prefix id has {2 * PREFIX_ID_BYTES} hex digits, as in x-kvpin-prefixes; got {value!r:.80}")
    return found


def token_ids_of(values: object) -> list[int]:
    """Token ids. Raises BadRequest."""
    if not isinstance(values, list) or not values:
        raise BadRequest("token_ids must be a list of numbers, not empty")
    if not all(type(value) is int and 0 <= value < 1 << 32 for value in values):
        raise BadRequest("token_ids must be whole numbers from 0 to 2^32 - 1")
    return values

"""The operator's routes: what is protected, renew it, end it.

    POST /v1/cache/evict                 {messages (+ tools, system) | token_ids | prefixes | label, mode, dry_run}
    GET  /v1/cache/prefixes              ?label= &id= &after= &limit=
    POST /v1/cache/prefixes/{id}/renew   {ttl}
    GET  /v1/cache/status

They stand behind the engine's authentication, like all of /v1.
"""

import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvpin.calls import expect
from kvpin.client import Client
from kvpin.errors import KvpinError, ProtocolError
from kvpin.http.asking import ask
from kvpin.http.engine import RenderError
from kvpin.http.markers import TTL_DEFAULT_MS, parse_ttl
from kvpin.http.middleware import Holder
from kvpin.http.selection import BadRequest, Selector, prefix_id_of
from kvpin.http.service import Service
from kvpin.limits import BODY_BYTES_MAX, LIST_LIMIT_MAX
from kvpin.protocol import (
    Expired,
    ExpireGuaranteed,
    ExpireMode,
    ListPrefixes,
    Prefixes,
    PrefixInfo,
    Renew,
    Stats,
    StatsReply,
)

Handler = Callable[[Service, Client, Request], Awaitable[dict[str, Any]]]

logger = logging.getLogger(__name__)


class NotFound(Exception):
    """Answer 404."""


def routes(holder: Holder) -> list[Route]:
    """All routes, to be added to the engine's application."""

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> JSONResponse:
            return await _answer(holder, handler, request)

        return Route(path, endpoint, methods=[method], include_in_schema=False)

    return [
        route("/v1/cache/evict", "POST", evict),
        route("/v1/cache/prefixes", "GET", list_prefixes),
        route("/v1/cache/prefixes/{id}/renew", "POST", renew),
        route("/v1/cache/status", "GET", status),
    ]


async def evict(service: Service, client: Client, request: Request) -> dict[str, Any]:
    """End windows now. The counts are those of what was, or with `dry_run` would be, affected."""
    body = await _body(request)
    try:
        mode = ExpireMode(body.get("mode", ExpireMode.EXPIRE))
    except ValueError as error:
        raise BadRequest(f"mode must be one of {', '.join(ExpireMode)}, not {body['mode']!r}") from error
    dry_run = body.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise BadRequest(f"dry_run must be true or false, not {dry_run!r}")
    ids = await _selector(service, client).select(body)
    counts = Expired(0, 0, 0)
    for start in range(0, len(ids), LIST_LIMIT_MAX):
        question = ExpireGuaranteed(ids[start : start + LIST_LIMIT_MAX], mode, dry_run)
        counts = _sum(counts, expect(await ask(client, question, client.config.call_timeout_ms), Expired))
    service.counters.add("evictions")
    return {"mode": mode, "dry_run": dry_run, "ids": [prefix_id.hex() for prefix_id in ids], **_plain(counts)}


async def list_prefixes(service: Service, client: Client, request: Request) -> dict[str, Any]:
    """One page of the live prefixes, by id; `next` is the `after` of the next page, null at the end."""
    query = request.query_params
    limit = query.get("limit", str(LIST_LIMIT_MAX))
    if not limit.isdecimal() or not 1 <= int(limit) <= LIST_LIMIT_MAX:
        raise BadRequest(f"limit must be 1 to {LIST_LIMIT_MAX}, not {limit!r}")
    question = ListPrefixes(
        prefix_ids=[prefix_id_of(value) for value in query.getlist("id")],
        label=query.get("label", ""),
        after=prefix_id_of(query["after"]) if query.get("after") else b"",
        limit=int(limit),
    )
    page = expect(await ask(client, question, client.config.call_timeout_ms), Prefixes)
    more = len(page.prefixes) == int(limit)
    return {
        "prefixes": [_plain_prefix(prefix) for prefix in page.prefixes],
        "total": page.total,
        "next": page.prefixes[-1].prefix_id.hex() if more else None,
    }


async def renew(service: Service, client: Client, request: Request) -> dict[str, Any]:
    """Extend the open windows of one prefix to now + ttl; never shorten them."""
    prefix_id = prefix_id_of(request.path_params["id"])
    body = await _body(request)
    ttl_ms = parse_ttl(body["ttl"]) if body.get("ttl") is not None else TTL_DEFAULT_MS
    if ttl_ms is None or ttl_ms > service.config.ttl_max_ms:
        most_s = service.config.ttl_max_ms // 1000
        raise BadRequest(f'ttl must be "5m", "1h", "90s" or whole seconds, at most {most_s} s: {body.get("ttl")!r:.80}')
    counts = expect(await ask(client, Renew(prefix_id, ttl_ms), client.config.call_timeout_ms), Expired)
    if not counts.prefixes:
        raise NotFound(f"no open window of prefix {prefix_id.hex()}")
    return {"id": prefix_id.hex(), "ttl_ms": ttl_ms, **_plain(counts)}


async def status(service: Service, client: Client, request: Request) -> dict[str, Any]:
    """Is the master there, how full is it, and what happened here."""
    segment = client.segment
    shown: dict[str, Any] = {
        "connected": client.ready,
        "epoch": client.epoch,
        "pool_bytes": segment.size_bytes if segment else None,
        "block_tokens": service.engine.block_tokens,
        "protects": service.engine.protects,
        "http": service.counters.snapshot(),
        "client": client.counters,
        "config": msgspec.to_builtins(service.config),
        "master": None,
    }
    try:
        shown["master"] = expect(await ask(client, Stats(), client.config.call_timeout_ms), StatsReply).values
    except KvpinError as error:
        shown["error"] = str(error)
    return shown


async def _answer(holder: Holder, handler: Handler, request: Request) -> JSONResponse:
    service = holder.service
    if service is None or service.client is None:
        return _error(503, "kvpin is not configured in this engine: start it with the kvpin connector")
    try:
        return JSONResponse(await handler(service, service.client, request))
    except (BadRequest, RenderError, ProtocolError) as error:
        return _error(400, str(error))
    except NotFound as error:
        return _error(404, str(error))
    except KvpinError as error:
        return _error(503, f"the kvpin master can't be asked now ({error}): try again, or see `kvpin status`")
    except Exception:
        service.fault("routes")
        return _error(500, "a fault in kvpin; the server's log says more")


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the request. Raises BadRequest."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES_MAX:
            raise BadRequest(f"the body is larger than {BODY_BYTES_MAX} bytes")
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _selector(service: Service, client: Client) -> Selector:
    return Selector(service.engine, client, client.config.call_timeout_ms)


def _sum(first: Expired, second: Expired) -> Expired:
    pairs = zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True)
    return Expired(*(one + other for one, other in pairs))


def _plain(counts: Expired) -> dict[str, int]:
    return msgspec.structs.asdict(counts)


def _plain_prefix(prefix: PrefixInfo) -> dict[str, Any]:
    fields = msgspec.structs.asdict(prefix)
    return {"id": fields.pop("prefix_id").hex(), **fields}


def _error(status_code: int, message: str) -> JSONResponse:
    error = {"message": message, "type": HTTPStatus(status_code).phrase, "param": None, "code": status_code}
    return JSONResponse({"error": error}, status_code)

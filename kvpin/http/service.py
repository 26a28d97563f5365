"""What middleware and routes share: settings, the engine, the master's client, and how a request is prepared."""

import asyncio
import json
import logging
import re
import secrets
from typing import Any

import msgspec

from kvpin.client import Client
from kvpin.counters import Counters
from kvpin.errors import KvpinError
from kvpin.http.asking import with_reports
from kvpin.http.engine import Engine, RenderError
from kvpin.http.markers import Marked, MarkerError, parse
from kvpin.http.offsets import locate
from kvpin.http.outcome import Outcome
from kvpin.http.places import Dialect, strip
from kvpin.http.settings import HttpConfig
from kvpin.http.sidefield import FIELD, SideField, sign
from kvpin.limits import LOCATE_S_MAX

PARAMETERS = "kv_transfer_params"  # the engine's own per-request parameters, which carry the side field
TOKEN_BYTES = 16
# What a body of interest contains: a marker, or a side field (also with its ASCII written as escapes).
_INTERESTING = re.compile(rb"cache_control|prompt_cache_(?:breakpoint|options)|\"kvpin|\\u00[0-7]")

logger = logging.getLogger(__name__)


class Refusal(msgspec.Struct, frozen=True):
    """Answer 400 with this text."""

    text: str


class Prepared(msgspec.Struct, frozen=True):
    """`body` None: send the original. `outcome` None: the request asked for nothing. `token`: of its report."""

    body: bytes | None = None
    outcome: Outcome | None = None
    token: bytes = b""


UNTOUCHED = Prepared()


class Service:
    """`client` None: markers are taken out of requests, and nothing is protected."""

    def __init__(self, config: HttpConfig, engine: Engine, client: Client | None, key: bytes) -> None:
        self.config = config
        self.engine = engine
        self.client = client
        self.counters = Counters()
        self._key = key

    async def prepare(self, dialect: Dialect, raw: bytes, label: str) -> Prepared | Refusal:
        """The request as the engine should see it. Never raises, but for cancellation."""
        if not _INTERESTING.search(raw):
            return UNTOUCHED
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                return UNTOUCHED
            return await self._prepare(dialect, body, label)
        except MarkerError as error:
            self.counters.add("requests_refused")
            return Refusal(str(error))
        except (ValueError, RecursionError):
            return UNTOUCHED  # the engine says what's wrong with it
        except Exception:
            self.fault("prepare")
            return Prepared(outcome=Outcome(failure="error"))

    async def report(self, prepared: Prepared, wait_ms: float) -> Outcome:
        """What the request's marks achieved so far. Never raises, but for cancellation."""
        outcome = prepared.outcome or Outcome()
        if not outcome.prefixes or self.client is None:
            return outcome
        try:
            return await with_reports(self.client, outcome, prepared.token, wait_ms)
        except KvpinError:
            self.counters.add("reports_missing")
        except Exception:
            self.fault("report")
        return outcome

    def fault(self, where: str) -> None:
        """Count and log an exception of kvpin's own that must not reach the request."""
        self.counters.add("faults")
        logger.exception("event=fault where=%s effect='the request goes on without kvpin'", where)

    async def _prepare(self, dialect: Dialect, body: dict[str, Any], label: str) -> Prepared:
        forged = _drop_side_field(body)
        if forged:
            self.counters.add("side_fields_dropped")
        marked = parse(dialect, body, strict=self.config.strict, ttl_max_ms=self.config.ttl_max_ms)
        stripped = strip(dialect, body)
        if not marked.breakpoints and not marked.notes:
            return Prepared(_encode(body)) if forged or stripped else UNTOUCHED
        self.counters.add("requests_marked")
        outcome = await self._locate(dialect, body, marked, label or self.config.label)
        if not outcome.prefixes:
            self.counters.add("requests_unprotected")
            return Prepared(_encode(body), outcome)
        token = secrets.token_bytes(TOKEN_BYTES)
        parameters = body.get(PARAMETERS) or {}
        body[PARAMETERS] = {**parameters, FIELD: sign(SideField(outcome.prefixes, token.hex()), self._key)}
        return Prepared(_encode(body), outcome, token)

    async def _locate(self, dialect: Dialect, body: dict[str, Any], marked: Marked, label: str) -> Outcome:
        """Where the prefixes end, or why there are none."""
        failed = Outcome(notes=marked.notes)
        if not marked.breakpoints:
            return failed
        if self.client is None or not self.engine.protects:
            return msgspec.structs.replace(failed, failure="no_connector")
        if not isinstance(body.get(PARAMETERS), dict | None):
            return msgspec.structs.replace(failed, failure="malformed")  # as the engine will say
        try:
            located = await asyncio.wait_for(
                locate(self.engine, dialect, body, marked.breakpoints, label), LOCATE_S_MAX
            )
        except RenderError:
            return msgspec.structs.replace(failed, failure="unrenderable")
        except TimeoutError:
            self.counters.add("locate_timeouts")
            return msgspec.structs.replace(failed, failure="timeout")
        except Exception:
            self.fault("locate")
            return msgspec.structs.replace(failed, failure="error")
        return Outcome(located.prefixes, located.problems, marked.notes)


def _drop_side_field(body: dict[str, Any]) -> bool:
    """Only this process writes the side field, whatever a client sent."""
    parameters = body.get(PARAMETERS)
    if not isinstance(parameters, dict) or FIELD not in parameters:
        return False
    body[PARAMETERS] = {name: value for name, value in parameters.items() if name != FIELD}
    return True


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()

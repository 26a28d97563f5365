"""Ask the master from an event loop, with a deadline."""

import asyncio

import msgspec

from kvpin.calls import PendingCall
from kvpin.client import Client
from kvpin.errors import CallTimeout
from kvpin.http.outcome import Outcome
from kvpin.limits import REPORT_POLL_MS
from kvpin.protocol import ReplyBody, Report, Reported, RequestBody


async def ask(client: Client, body: RequestBody, timeout_ms: float) -> ReplyBody:
    """The answer. Raises KvpinError; after `timeout_ms` CallTimeout.

    So short a wait opens no breaker: the client finds out by itself, within its call timeout, that nothing is answered.
    """
    loop = asyncio.get_running_loop()
    settled = asyncio.Event()

    def wake(call: PendingCall) -> None:
        loop.call_soon_threadsafe(settled.set)

    call = client.submit(body)
    call.add_done_callback(wake)
    try:
        await asyncio.wait_for(settled.wait(), timeout_ms / 1000)
    except TimeoutError:
        if not call.settled:
            call.abandon()
            raise CallTimeout(f"no answer to {type(body).__name__} within {timeout_ms:g} ms") from None
    except asyncio.CancelledError:
        call.abandon()
        raise
    return call.wait(0)  # it's settled


async def with_reports(client: Client, outcome: Outcome, token: bytes, wait_ms: float) -> Outcome:
    """The outcome as far as the master knows it, asked for until it's complete or `wait_ms` are over.

    Raises KvpinError.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_ms / 1000
    while True:
        left_ms = (deadline_s - loop.time()) * 1000
        try:
            reply = await ask(client, Report(token), max(1.0, left_ms))
        except CallTimeout:
            if outcome.reports is None:
                raise
            return outcome  # what it said before still counts
        if isinstance(reply, Reported):
            outcome = msgspec.structs.replace(outcome, reports=reply.marks)
        if outcome.complete or (deadline_s - loop.time()) * 1000 <= REPORT_POLL_MS:
            return outcome
        await asyncio.sleep(REPORT_POLL_MS / 1000)

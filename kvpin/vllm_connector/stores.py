"""Stores: one put_start for the chunks that the scheduler offers, put_end when all ranks have copied.

The scheduler waits for the answer, but never longer than the put deadline, and sends no more in a step that has waited
STEP_STORE_WAITS of them. Whatever goes wrong means that blocks aren't stored this time.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from kvpin.client import Client, PendingCall
from kvpin.config import ClientConfig
from kvpin.errors import KvpinError, Unavailable
from kvpin.keys import KV_CACHE_ID, kv_key
from kvpin.limits import BATCH_KEYS_MAX, CHECKS_PENDING_MAX, PUT_MARGIN_MS, STEP_STORE_WAITS
from kvpin.protocol import Ended, EndStatus, Grant, PutEnd, PutItem, PutRevoke, PutStart, PutStarted, PutStatus
from kvpin.session import Session
from kvpin.vllm_connector import metrics
from kvpin.vllm_connector.lookups import outcome_of
from kvpin.vllm_connector.request import Put, RequestState

logger = logging.getLogger(__name__)


class Stores:
    """The scheduler's puts. `put_timeout_ms`: after it the master gives a put up."""

    def __init__(
        self,
        client: Client,
        config: ClientConfig,
        object_bytes: int,
        counters: metrics.Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._object_bytes = object_bytes
        self._counters = counters
        self._clock = clock
        self._put_wait_s = config.put_deadline_ms / 1000
        self._step_wait_left_s = STEP_STORE_WAITS * self._put_wait_s
        self._checks: deque[tuple[PendingCall, str]] = deque()

    def start(
        self, state: RequestState, keys: Sequence[OffloadKey], end_tokens: Sequence[int], ticket: int
    ) -> tuple[Put, list[OffloadKey], list[int]]:
        """Ask for ranges: the put, the keys to write, and their offsets, in the given order.

        Raises CallTimeout at the deadline, other KvpinErrors at once.
        """
        segment = self._client.segment
        if state.namespace is None or segment is None or not self._client.ready:
            raise Unavailable("not connected")
        if round(self._step_wait_left_s * 1000) <= 0:
            raise Unavailable("this step has waited enough")
        object_keys = [kv_key(state.namespace, get_offload_block_hash(key), get_offload_group_idx(key)) for key in keys]
        items = [
            PutItem(object_key, self._object_bytes, end_token)
            for object_key, end_token in zip(object_keys, end_tokens, strict=True)
        ]
        calls = [
            self._client.submit(self._put_start(state, items[start : start + BATCH_KEYS_MAX]))
            for start in range(0, len(items), BATCH_KEYS_MAX)
        ]
        replies = self._wait(calls, items)
        if segment.epoch != self._client.epoch or any(call.session is not calls[0].session for call in calls):
            raise Unavailable("the session with the master ended while it was asked")
        offsets = list(itertools.chain.from_iterable(reply.offsets for reply in replies))
        statuses = list(itertools.chain.from_iterable(reply.statuses for reply in replies))
        granted = [index for index, status in enumerate(statuses) if status is PutStatus.WRITE]
        put = Put(
            ticket=ticket,
            object_keys=[object_keys[index] for index in granted],
            segment=segment,
            session=calls[0].session,
            deadline_s=min(call.sent_s for call in calls) + (self._client.put_timeout_ms - PUT_MARGIN_MS) / 1000,
        )
        self._count(statuses, list(itertools.chain.from_iterable(reply.grants for reply in replies)))
        return put, [keys[index] for index in granted], [offsets[index] for index in granted]

    def finish(self, put: Put, failure: str = "") -> None:
        """All ranks are done with the put's ranges: make the objects visible, or give the ranges back."""
        failure = failure or put.failure
        count = len(put.object_keys)
        if put.segment.epoch != self._client.epoch or self._clock() >= put.deadline_s:
            # The master knows no such put any more. An end or revoke now could hit a later put of the same keys.
            self._counters.add(metrics.STORE_BLOCKS, "lost", count=count)
        elif failure:
            self._counters.add(metrics.STORE_BLOCKS, "failed", count=count)
            self._send(put.object_keys, PutRevoke, put.session)
        else:
            self._send(put.object_keys, PutEnd, put.session)

    def step(self) -> None:
        """Once a scheduler step: a new budget for waiting, and answers that came since."""
        self._step_wait_left_s = STEP_STORE_WAITS * self._put_wait_s
        while self._checks and self._settled(*self._checks[0]):
            self._checks.popleft()

    def _put_start(self, state: RequestState, items: list[PutItem]) -> PutStart:
        first_end = min(item.end_token for item in items)
        marks = [mark for mark in state.marks if mark.end_token >= first_end]
        return PutStart(items=items, marks=marks, cache=KV_CACHE_ID, report=state.report if marks else b"")

    def _wait(self, calls: list[PendingCall], items: list[PutItem]) -> list[PutStarted]:
        started_s = self._clock()
        replies: list[PutStarted] = []
        try:
            for call in calls:
                left_s = started_s + self._put_wait_s - self._clock()
                reply = call.wait(max(0.0, left_s) * 1000)
                if not isinstance(reply, PutStarted):
                    raise Unavailable(f"unexpected answer {type(reply).__name__}")
                replies.append(reply)
        except KvpinError:
            for call in calls[len(replies) :]:
                call.abandon()
            statuses = itertools.chain.from_iterable(reply.statuses for reply in replies)
            granted = [item.key for item, status in zip(items, statuses, strict=False) if status is PutStatus.WRITE]
            self._send(granted, PutRevoke, calls[0].session)
            raise
        finally:
            self._step_wait_left_s -= self._clock() - started_s
        return replies

    def _send(self, object_keys: list[bytes], body: type[PutEnd] | type[PutRevoke], session: Session | None) -> None:
        for start in range(0, len(object_keys), BATCH_KEYS_MAX):
            call = self._client.submit(body(keys=object_keys[start : start + BATCH_KEYS_MAX]), session)
            self._checks.append((call, "stored" if body is PutEnd else ""))
        while len(self._checks) > CHECKS_PENDING_MAX:
            self._checks.popleft()[0].abandon()

    def _settled(self, call: PendingCall, outcome: str) -> bool:
        try:
            reply = call.poll()
        except KvpinError as error:
            logger.debug("event=put_end_failed error=%s", error)
            self._counters.add(metrics.STORE_BLOCKS, outcome_of(error))
            return True
        if isinstance(reply, Ended) and outcome:
            stored = reply.statuses.count(EndStatus.OK)
            self._counters.add(metrics.STORE_BLOCKS, outcome, count=stored)
            self._counters.add(metrics.STORE_BLOCKS, "lost", count=len(reply.statuses) - stored)
        return reply is not None

    def _count(self, statuses: Collection[PutStatus], grants: Collection[Grant]) -> None:
        for status in set(statuses):
            word = "granted" if status is PutStatus.WRITE else status.name.lower()
            self._counters.add(metrics.STORE_BLOCKS, word, count=sum(each is status for each in statuses))
        for grant in set(grants) - {Grant.NONE}:
            self._counters.add(metrics.GRANTS, grant.name.lower(), count=sum(each is grant for each in grants))

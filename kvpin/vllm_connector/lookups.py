"""Lookups: asked in one message when a request arrives, polled when the scheduler wants to know.

A question is asked again when its answer has aged (the request waited in the queue, was preempted), when the request
has grown, or when the master was started anew. Nothing here waits: an answer that isn't there by the deadline is a
miss, and opens the client's breaker.
"""

import logging
import time
from collections.abc import Callable, Sequence

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, get_offload_block_hash, get_offload_group_idx

from kvpin.client import Client, PendingCall
from kvpin.config import ClientConfig
from kvpin.errors import CallTimeout, EpochChanged, KvpinError, Unavailable
from kvpin.keys import kv_key
from kvpin.limits import BATCH_KEYS_MAX, LEASE_MARGIN_MS
from kvpin.protocol import GetReplicas, Grant, Replicas
from kvpin.vllm_connector import metrics
from kvpin.vllm_connector.request import Answer, Question, RequestState

logger = logging.getLogger(__name__)


class Lookups:
    """The scheduler's questions to the master. `object_bytes`: the size that a usable object has."""

    def __init__(
        self,
        client: Client,
        config: ClientConfig,
        object_bytes: int,
        counters: metrics.Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._object_bytes = object_bytes
        self._counters = counters
        self._clock = clock

    def refresh(
        self, state: RequestState, keys: Sequence[OffloadKey], end_token_of: Callable[[OffloadKey], int]
    ) -> None:
        """Bring the request's answer up to date: ask if there's none that can be used, and poll."""
        if state.load_failed or state.load is not None:
            return
        if state.question is None and not self._usable(state.answer, len(keys)):
            self.forget(state)
            self._ask(state, keys, end_token_of)
        if state.question is not None:
            self._poll(state, state.question)

    @staticmethod
    def result(state: RequestState, key: OffloadKey) -> LookupResult:
        """What is known of one key since the last `refresh`."""
        if state.question is not None:
            return LookupResult.RETRY
        if state.answer is not None and key in state.answer.offsets and not state.load_failed:
            return LookupResult.HIT
        return LookupResult.MISS

    def forget(self, state: RequestState) -> None:
        """Give up what is known or under way; leases that no load uses end now."""
        if state.question is not None:
            for _, call in state.question.calls:
                call.abandon()
            state.question = None
        if state.answer is not None and (state.load is None or state.load.answer is not state.answer):
            self._release(state.answer.leases)
        state.answer = None

    def load_ended(self, state: RequestState) -> None:
        if state.load is not None:
            self._release(state.load.answer.leases)
            state.load = None
            state.answer = None

    def _usable(self, answer: Answer | None, keys: int) -> bool:
        if answer is None or keys > answer.keys or self._clock() >= answer.fresh_until_s:
            return False
        return answer.segment is None or answer.segment.epoch == self._client.epoch

    def _ask(self, state: RequestState, keys: Sequence[OffloadKey], end_token_of: Callable[[OffloadKey], int]) -> None:
        namespace = state.namespace
        if namespace is None or not keys:
            return
        calls: list[tuple[Sequence[OffloadKey], PendingCall]] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            part = keys[start : start + BATCH_KEYS_MAX]
            body = GetReplicas(
                keys=[kv_key(namespace, get_offload_block_hash(key), get_offload_group_idx(key)) for key in part],
                lease_ms=self._config.lease_ms,
                marks=state.marks,
                end_tokens=[end_token_of(key) for key in part] if state.marks else [],
                report=state.report,
            )
            calls.append((part, self._client.submit(body)))
        state.question = Question(calls, len(keys), self._client.segment)

    def _poll(self, state: RequestState, question: Question) -> None:
        replies: list[tuple[Sequence[OffloadKey], float, Replicas]] = []
        try:
            late_s = question.calls[0][1].sent_s + self._config.lookup_deadline_ms / 1000
            if self._clock() < late_s and not all(call.settled for _, call in question.calls):
                return
            for keys, call in question.calls:
                reply = call.wait(0)
                if not isinstance(reply, Replicas):
                    raise Unavailable(f"unexpected answer {type(reply).__name__}")
                replies.append((keys, call.sent_s, reply))
            self._accept(state, question, replies)
        except KvpinError as error:
            self._refuse(state, question, error, [reply.lease_id for _, _, reply in replies])

    def _accept(
        self,
        state: RequestState,
        question: Question,
        replies: list[tuple[Sequence[OffloadKey], float, Replicas]],
    ) -> None:
        segment = question.segment
        if segment is None or segment.epoch != self._client.epoch:
            raise EpochChanged("the master was started anew while it was asked")
        leases_s = [reply.lease_ms / 1000 for _, _, reply in replies if reply.lease_id]
        lease_s = min(leases_s, default=self._config.lease_ms / 1000)  # without a hit it's just the answer's age
        first_sent_s = min(sent_s for _, sent_s, _ in replies)
        answer = Answer(
            keys=question.keys,
            fresh_until_s=first_sent_s + lease_s / 2,  # half of the lease stays for the copy
            leases=[reply.lease_id for _, _, reply in replies if reply.lease_id],
            segment=segment,
            deadline_s=first_sent_s + lease_s - LEASE_MARGIN_MS / 1000,
        )
        for keys, _, reply in replies:
            for key, offset, size_bytes in zip(keys, reply.offsets, reply.sizes, strict=True):
                if offset >= 0 and size_bytes == self._object_bytes:
                    answer.offsets[key] = offset
            self._counters.add(metrics.GRANTS, "renewed", count=reply.grants.count(Grant.RENEWED))
        state.question = None
        state.answer = answer
        self._counters.add(metrics.LOOKUPS, "answered")
        self._counters.add(metrics.LOOKUP_BLOCKS, "hit", count=len(answer.offsets))
        self._counters.add(metrics.LOOKUP_BLOCKS, "miss", count=question.keys - len(answer.offsets))

    def _refuse(self, state: RequestState, question: Question, error: KvpinError, leases: list[int]) -> None:
        for _, call in question.calls:
            call.abandon()
        self._release(leases)
        state.question = None
        # Remembered for one probe period of the breaker, so that a request that can't be scheduled asks no faster.
        state.answer = Answer(keys=question.keys, fresh_until_s=self._clock() + self._config.retry_ms / 1000)
        self._counters.add(metrics.LOOKUPS, outcome_of(error))
        self._counters.add(metrics.LOOKUP_BLOCKS, "miss", count=question.keys)
        logger.debug("event=lookup_failed keys=%d error=%s", question.keys, error)

    def _release(self, leases: Sequence[int]) -> None:
        for lease_id in leases:
            if lease_id:
                self._client.release(lease_id)


def outcome_of(error: KvpinError) -> str:
    """The counters' word for a failed call."""
    match error:
        case CallTimeout():
            return "timeout"
        case EpochChanged():
            return "epoch_changed"
        case Unavailable():
            return "unavailable"
    return "refused"

"""The scheduler's side: answers vLLM's OffloadingManager verbs from one batched lookup and one put_start a request.

The order of calls for a request: `on_new_request`, `arrived` (our connector), then `refresh` and `lookup` until it
is scheduled, `prepare_load`/`complete_load`, `prepare_store`/`complete_store`, `on_request_finished`. Every entry point
is guarded: a fault is a miss.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpin.client import Client
from kvpin.config import ClientConfig
from kvpin.errors import CallTimeout, KvpinError
from kvpin.http import sidefield
from kvpin.keys import kv_namespace_prefix
from kvpin.limits import FAULT_LOG_PERIOD_S
from kvpin.log import Throttle
from kvpin.protocol import Clear, SegmentInfo
from kvpin.vllm_connector import metrics
from kvpin.vllm_connector.guard import guarded, nothing
from kvpin.vllm_connector.layout import ObjectLayout
from kvpin.vllm_connector.lookups import Lookups, outcome_of
from kvpin.vllm_connector.request import Load, Put, RequestState, marks_of
from kvpin.vllm_connector.stores import Stores
from kvpin.vllm_connector.transfer import TransferSpec

logger = logging.getLogger(__name__)


def _nowhere() -> TransferSpec:
    """A transfer whose deadline has passed: every worker refuses it."""
    return TransferSpec(ticket=0, segment_path="", epoch=0, offsets=(), slot_bytes=0, deadline_s=0.0)


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput(keys_to_store=[], store_spec=_nowhere(), evicted_keys=[])


def _end_token(context: ReqContext, key: OffloadKey) -> int:
    return context.get_offload_key_position(key) or 0


class KVPinManager(OffloadingManager):
    """Lookups, puts and leases of one engine. `side_field_key` empty: no side field is trusted."""

    def __init__(
        self,
        client: Client,
        config: ClientConfig,
        layout: ObjectLayout,
        side_field_key: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.counters = metrics.Counters()
        self.fault_log = Throttle(FAULT_LOG_PERIOD_S)
        self.config = config
        self.reset_confirmed = True
        self._layout = layout
        self._side_field_key = side_field_key
        self._lookups = Lookups(client, config, layout.object_bytes, self.counters, clock)
        self._stores = Stores(client, config, layout.object_bytes, self.counters, clock)
        self._states: dict[str, RequestState] = {}  # requests the scheduler knows, by id
        self._tickets = itertools.count(1)
        self._open: dict[int, tuple[RequestState, Load | Put]] = {}  # transfers under way, by ticket
        self._namespaces: set[bytes] = set()

    # --- the connector's own calls --------------------------------------------------------------------------------

    @guarded(nothing)
    def arrived(
        self, context: ReqContext, namespace: Callable[[], bytes], chain: Callable[[], Sequence[OffloadKey]]
    ) -> None:
        """A new request: ask at once for the chain of its prompt, so that the answer is there when it's wanted."""
        state = self._state(context)
        state.namespace = namespace()
        self._namespaces.add(state.namespace)
        self.refresh(context, chain)

    @guarded(nothing)
    def refresh(self, context: ReqContext, chain: Callable[[], Sequence[OffloadKey]]) -> None:
        """The scheduler is about to look up keys of this chain."""
        self._lookups.refresh(self._state(context), chain(), lambda key: _end_token(context, key))

    @guarded(nothing)
    def note_failures(self, failures: Mapping[int, str]) -> None:
        """What workers report: ticket -> reason."""
        for ticket, reason in failures.items():
            state, transfer = self._open.get(ticket, (None, None))
            if isinstance(transfer, Put):
                transfer.failure = reason
                self.counters.add(metrics.TRANSFER_FAILURES, "store", reason)
            elif state is not None:
                state.load_failed = True
                self.counters.add(metrics.TRANSFER_FAILURES, "load", reason)

    @guarded(nothing)
    def orphan_ended(self, ticket: int) -> None:
        """A store that was under way during `reset_cache` has ended: nobody may see its bytes."""
        _, transfer = self._open.pop(ticket, (None, None))
        if isinstance(transfer, Put):
            self._stores.finish(transfer, failure="reset")

    # --- vLLM's verbs ---------------------------------------------------------------------------------------------

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Marked requests pass their whole chain through `prepare_store`, whatever the engine's own cache holds."""
        state = RequestState()
        req_context.set_state(state)
        self._states[req_context.req_id] = state
        raw = (req_context.kv_transfer_params or {}).get(sidefield.FIELD)
        if raw is None:
            return RequestOffloadingContext()
        field = sidefield.verify(raw, self._side_field_key) if self._side_field_key else None
        if field is None:
            self.counters.add(metrics.SIDE_FIELDS_REJECTED)
            return RequestOffloadingContext()
        state.marks = marks_of(field)
        state.report = bytes.fromhex(field.report)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if state.marks else OffloadPolicy.CHUNK_LEVEL)

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the answer of the last `refresh`, so that one pass of the scheduler sees one picture."""
        return self._lookups.result(self._state(req_context), key)

    @guarded(lambda: CacheHitSource.HOST)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    @guarded(_nowhere)
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        state = self._state(req_context)
        ticket = next(self._tickets)
        answer = state.answer
        if answer is None or answer.segment is None:
            raise LookupError("a load without a lookup")
        offsets = [answer.offsets[key] for key in keys]
        state.load = Load(ticket, answer)
        self._open[ticket] = (state, state.load)
        return self._spec(ticket, answer.segment, offsets, answer.deadline_s)

    @guarded(nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._state(req_context)
        if state.load is None:
            # prepare_load had nothing to offer, so the workers refused: don't hit the same fault again.
            state.load_failed = True
            return
        self._open.pop(state.load.ticket, None)
        self._lookups.load_ended(state)

    @guarded(_nothing_to_store)
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Ranges for what kvpin lacks; windows on what it has. None: try once more in the next step."""
        state = self._state(req_context)
        ordered = list(keys)
        try:
            end_tokens = [_end_token(req_context, key) for key in ordered]
            put, granted, offsets = self._stores.start(state, ordered, end_tokens, next(self._tickets))
        except KvpinError as error:
            self.counters.add(metrics.STORE_BLOCKS, outcome_of(error), count=len(ordered))
            once_more = isinstance(error, CallTimeout) and not state.put_timed_out
            state.put_timed_out = state.put_timed_out or once_more
            return None if once_more else _nothing_to_store()
        if not granted:
            return _nothing_to_store()
        self._open[put.ticket] = (state, put)
        state.puts.update((key, put) for key in granted)
        return PrepareStoreOutput(granted, self._spec(put.ticket, put.segment, offsets, put.deadline_s), [])

    @guarded(nothing)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        state = self._state(req_context)
        puts = {put.ticket: put for key in keys if (put := state.puts.pop(key, None)) is not None}
        for put in puts.values():
            self._open.pop(put.ticket, None)
            self._stores.finish(put, failure="" if success else "engine")

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._stores.step()
        for req_id in context.new_req_ids:
            # It runs without having loaded (all): its lease would only stand in the way of others.
            state = self._states.get(req_id)
            if state is not None and state.load is None:
                self._lookups.forget(state)

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._states.pop(req_context.req_id, None)
        self._lookups.forget(self._state(req_context))

    def disown(self, context: ReqContext, keys: Collection[OffloadKey]) -> list[int]:
        """The tickets of a store that vLLM is about to forget; `orphan_ended` ends each."""
        state = self._state(context)
        return sorted({put.ticket for key in keys if (put := state.puts.pop(key, None)) is not None})

    @guarded(nothing)
    def reset_cache(self) -> None:
        """Remove this engine's objects from kvpin, but for those in an open window: an engine has no right to them.

        `reset_confirmed` tells afterwards whether the master did.
        """
        self.reset_confirmed = False
        for state in self._states.values():
            self._lookups.forget(state)
        try:
            for namespace in sorted(self._namespaces):
                self.client.call(Clear(kv_namespace_prefix(namespace)), timeout_ms=self.config.call_timeout_ms)
            self.reset_confirmed = True
        except KvpinError as error:
            logger.warning("event=reset_unconfirmed error='%s'", error)

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self.counters.drain(self.client.ready)

    @guarded(nothing)
    def shutdown(self) -> None:
        self.client.close()

    # --- parts ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _state(context: ReqContext) -> RequestState:
        state = context.get_state(RequestState)
        if state is None:
            raise LookupError(f"request {context.req_id} was never announced")
        return state

    def _spec(self, ticket: int, segment: SegmentInfo, offsets: Sequence[int], deadline_s: float) -> TransferSpec:
        return TransferSpec(
            ticket=ticket,
            segment_path=segment.path,
            epoch=segment.epoch,
            offsets=tuple(offsets),
            slot_bytes=self._layout.slot_bytes,
            deadline_s=deadline_s,
        )

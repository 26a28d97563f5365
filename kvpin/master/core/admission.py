"""Marks of one request against the blocks of its chain: who gets a window, and who doesn't and why.

Renewing an open window needs no admission. Opening one needs room under the limit, and an unbroken run of blocks from
the root: a prefix with a hole is of no use behind it, so the limited bytes go to leading runs. Reads only renew.
"""

from collections.abc import Sequence

from kvpin.limits import REPORT_BYTES_MAX
from kvpin.master.core.tables import Tables
from kvpin.master.core.types import COMPLETE, NO_GAP, Object, Prefix, Session
from kvpin.master.core.windows import is_open
from kvpin.protocol import Grant, Mark

NONE, OPENED, RENEWED = Grant.NONE, Grant.OPENED, Grant.RENEWED
CAPACITY_EXCEEDED, GAP = Grant.CAPACITY_EXCEEDED, Grant.GAP

# Of several objects that end at the same token (one a KV cache group), the worst outcome is that of the block.
_BADNESS = {RENEWED: 0, OPENED: 1, NONE: 2, GAP: 3, CAPACITY_EXCEEDED: 4}


class _Lane:
    """One mark of the request."""

    __slots__ = ("hole_token", "mark", "outcomes", "prefix", "renewed")

    def __init__(self, mark: Mark, prefix: Prefix | None) -> None:
        self.mark = mark
        self.prefix = prefix  # None: no record (yet, or PREFIXES_MAX are there)
        self.renewed = False
        self.hole_token = NO_GAP  # the first looked up block that this prefix doesn't hold
        self.outcomes: dict[int, Grant] = {}  # by end_token, for the report

    def note(self, end_token: int, grant: Grant) -> None:
        before = self.outcomes.get(end_token)
        if before is None or _BADNESS[before] < _BADNESS[grant]:
            self.outcomes[end_token] = grant


class MarkedBatch:
    """Offer it the blocks root first, then `finish` it."""

    __slots__ = ("_keys", "_lanes", "_now_ms", "_report", "_session", "_tables")

    def __init__(
        self, tables: Tables, session: Session, marks: Sequence[Mark], report: bytes, now_ms: int, *, create: bool
    ) -> None:
        assert len(report) <= REPORT_BYTES_MAX
        self._tables = tables
        self._session = session
        self._report = report
        self._now_ms = now_ms
        self._keys: dict[Grant, list[bytes]] = {grant: [] for grant in Grant}
        windows = tables.windows
        self._lanes: list[_Lane] = []
        for mark in sorted(marks, key=lambda mark: mark.end_token):
            if create:
                prefix = windows.find_or_make(session.tenant, mark, now_ms)
            else:
                prefix = windows.find(session.tenant, mark.prefix_id)
                if prefix is not None:
                    prefix.note_mark(mark)
            self._lanes.append(_Lane(mark, prefix))

    def protect(self, key: bytes, end_token: int, obj: Object | None) -> Grant:
        """Open or renew the window of a block, complete or being written. None: the block is neither, so a gap."""
        granted = RENEWED if obj is not None and is_open(obj) else OPENED
        best = NONE
        for lane in self._lanes:
            if lane.mark.end_token < end_token:
                continue
            refusal = self._admit(lane, key, end_token, obj)
            grant = granted if refusal is None else refusal
            if self._report:
                lane.note(end_token, grant)
            if refusal is None:
                best = granted
            elif best is NONE or best is GAP:
                best = refusal
        self._keys[best].append(key)
        return best

    def renew(self, key: bytes, end_token: int, obj: Object | None) -> Grant:
        """Renew or join the window of a block that was looked up, if it's open. None: a miss."""
        best = NONE
        for lane in self._lanes:
            if lane.mark.end_token < end_token:
                continue
            grant = RENEWED if obj is not None and obj.holders and self._extend(lane, end_token, obj) else NONE
            if self._report:
                lane.note(end_token, grant)
            if grant is RENEWED:
                best = grant
            else:
                lane.hole_token = min(lane.hole_token, end_token)
        self._keys[best].append(key)
        return best

    def finish(self) -> None:
        """Book what was achieved."""
        counters = self._tables.counters
        keys = self._keys
        counters["windows_opened"] += len(keys[OPENED])
        counters["windows_renewed"] += len(keys[RENEWED])
        counters["guarantees_refused"] += len(keys[CAPACITY_EXCEEDED])
        counters["guarantees_gapped"] += len(keys[GAP])
        marked_by = ", ".join(lane.mark.prefix_id.hex() for lane in self._lanes)
        for grant in (OPENED, RENEWED, CAPACITY_EXCEEDED, GAP):
            self._tables.stories.record(self._now_ms, f"marked by {marked_by}: {grant.name}", keys[grant])
        for lane in self._lanes:
            if lane.renewed and lane.prefix is not None:
                lane.prefix.renewals += 1
            if self._report:
                self._tables.reports.add(self._report, lane.mark, lane.outcomes)

    def _admit(self, lane: _Lane, key: bytes, end_token: int, obj: Object | None) -> Grant | None:
        """Let a prefix hold a block; None if it does now, else why it doesn't."""
        prefix = lane.prefix
        windows = self._tables.windows
        if prefix is None:
            return CAPACITY_EXCEEDED
        refusal: Grant | None = None
        if obj is None:
            refusal = GAP
        elif obj in prefix.holds:
            windows.hold(prefix, obj, self._now_ms + lane.mark.ttl_ms)
            lane.renewed = True
        elif obj in prefix.reserved:
            windows.reserve(prefix, obj, lane.mark.ttl_ms)
        elif end_token > prefix.gap_token:
            refusal = GAP
        elif not obj.holders and not self._tables.ledger.admits(obj):
            refusal = CAPACITY_EXCEEDED
        elif obj.phase is COMPLETE:
            if not windows.hold(prefix, obj, self._now_ms + lane.mark.ttl_ms):
                refusal = CAPACITY_EXCEEDED
        elif not windows.reserve(prefix, obj, lane.mark.ttl_ms):
            refusal = CAPACITY_EXCEEDED
        if refusal is not None:
            windows.note_gap(prefix, key, end_token)
        return refusal

    def _extend(self, lane: _Lane, end_token: int, obj: Object) -> bool:
        """Extend a prefix's own window on a guaranteed block, or join its other holders up to the first hole."""
        windows = self._tables.windows
        prefix = lane.prefix
        if end_token > lane.hole_token and (prefix is None or obj not in prefix.holds):
            return False
        if prefix is None:
            prefix = lane.prefix = windows.find_or_make(self._session.tenant, lane.mark, self._now_ms)
            if prefix is None:
                return False
        if obj in prefix.holds:
            lane.renewed = True
        elif end_token > prefix.gap_token:
            return False
        return windows.hold(prefix, obj, self._now_ms + lane.mark.ttl_ms)

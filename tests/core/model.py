"""The core's semantics once more, as simply as they can be written: dicts, lists, and a scan for every question.

It predicts every reply but two things, which it only judges: which range a put gets (a free one) and what is evicted
(nothing guaranteed or leased, soft-pinned last, the least recently used first, and only when there's need).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpin.protocol import EndStatus, Expired, ExpireMode, Grant, Mark, PutStarted, PutStatus, Replicas

from .scenario import PAGE, Block


@dataclass(eq=False)
class Item:
    block: Block
    offset: int
    soft: bool
    last: int
    windows: dict[bytes, int] = field(default_factory=dict)  # prefix -> until when; while being written: its ttl

    @property
    def order(self) -> tuple[int, int]:
        return (self.last, -self.block.end)


@dataclass(eq=False)
class Put:
    item: Item
    owner: str
    deadline: int
    force: bool
    cancelled: bool = False


@dataclass(eq=False)
class Lease:
    owner: str
    until: int
    items: list[Item]


class Model:
    def __init__(self, pool: int, limit: int, put_timeout: int, quarantine: int) -> None:
        self.pool, self.limit, self.put_timeout, self.quarantine_ms = pool, limit, put_timeout, quarantine
        self.now = 0
        self.objects: dict[bytes, Item] = {}
        self.writes: dict[bytes, Put] = {}
        self.lingering: list[Item] = []
        self.quarantine: list[tuple[int, str, Item]] = []  # until when, whose, what
        self.leases: dict[int, Lease] = {}
        self.gaps: dict[bytes, dict[bytes, int]] = {}

    # --- questions ---------------------------------------------------------------------------------------------------

    def items(self) -> list[Item]:
        return [*self.objects.values(), *(put.item for put in self.writes.values())]

    def leased(self, item: Item) -> bool:
        return any(item in lease.items for lease in self.leases.values())

    def evictable(self, item: Item) -> bool:
        return not item.windows and not self.leased(item)

    def guaranteed(self) -> int:
        return sum(item.block.pages for item in self.items() if item.windows)

    def ranges(self) -> list[tuple[int, int]]:
        held = [*self.items(), *self.lingering, *(item for _, _, item in self.quarantine)]
        return sorted((item.offset, item.block.pages * PAGE) for item in held)

    def blocks_of(self, prefix: bytes) -> list[Item]:
        return [item for item in self.objects.values() if prefix in item.windows]

    def live(self, prefix: bytes) -> bool:
        return any(prefix in item.windows for item in self.items())

    def could_place(self, pages: int) -> bool:
        """Is there room for it, or could evicting make some? (For one page, whatever the fragmentation.)"""
        used = sum(size for _, size in self.ranges()) // PAGE
        evictable = sum(item.block.pages for item in self.objects.values() if self.evictable(item))
        return self.pool - used + evictable >= pages

    # --- time and observation ----------------------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        self.now = max(self.now, now)
        for put in [put for put in self.writes.values() if put.deadline <= self.now]:
            self.lose(put)
        self.quarantine = [held for held in self.quarantine if held[0] > self.now]
        for item in self.objects.values():
            for prefix in [prefix for prefix, until in item.windows.items() if until <= self.now]:
                self.end_window(item, prefix)
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.until <= self.now]:
            del self.leases[lease_id]
        self.settle()

    def settle(self) -> None:
        """What follows from a step: freed ranges, and the end of prefixes that hold nothing."""
        self.lingering = [item for item in self.lingering if self.leased(item)]
        self.gaps = {prefix: gaps for prefix, gaps in self.gaps.items() if self.live(prefix)}

    def observe_eviction(self, visible: set[bytes]) -> None:
        """These objects are visible in the core now: were the others rightly evicted?"""
        gone = [item for key, item in self.objects.items() if key not in visible]
        for item in gone:
            assert self.evictable(item), f"evicted {item}"
            del self.objects[item.block.key]
        left = [item for item in self.objects.values() if self.evictable(item)]
        for item in gone:
            for other in left:
                assert item.soft or other.soft or item.order <= other.order, f"evicted {item} before {other}"
                assert not item.soft or other.soft, f"evicted soft-pinned {item} before {other}"

    # --- parts -------------------------------------------------------------------------------------------------------

    def end_window(self, item: Item, prefix: bytes) -> None:
        del item.windows[prefix]
        self.note_gap(prefix, item.block.key, item.block.end)

    def note_gap(self, prefix: bytes, key: bytes, end: int) -> None:
        old = self.objects.get(key)
        if old is None or prefix not in old.windows:
            self.gaps.setdefault(prefix, {})[key] = end

    def end_windows(self, item: Item) -> None:
        for prefix in list(item.windows):
            self.end_window(item, prefix)

    def drop(self, item: Item) -> None:
        del self.objects[item.block.key]
        self.end_windows(item)
        if self.leased(item):
            self.lingering.append(item)

    def lose(self, put: Put) -> None:
        self.revoke(put)
        self.quarantine.append((self.now + self.quarantine_ms, put.owner, put.item))

    def revoke(self, put: Put) -> None:
        del self.writes[put.item.block.key]
        self.end_windows(put.item)

    def admit(self, mark: Mark, key: bytes, end: int, item: Item | None) -> Grant | None:
        prefix = mark.prefix_id
        gaps = self.gaps.setdefault(prefix, {})
        refusal = None
        written = item is not None and self.objects.get(key) is not item
        until = mark.ttl_ms if written else self.now + mark.ttl_ms
        if item is None:
            refusal = Grant.GAP
        elif prefix in item.windows:
            item.windows[prefix] = max(until, item.windows[prefix])
            gaps.pop(key, None)
        elif gaps and end > min(gaps.values()):
            refusal = Grant.GAP
        elif not item.windows and self.guaranteed() + item.block.pages > self.limit:
            refusal = Grant.CAPACITY_EXCEEDED
        else:
            item.windows[prefix] = until
            gaps.pop(key, None)
        if refusal is not None:
            self.note_gap(prefix, key, end)
        return refusal

    def protect(self, marks: Sequence[Mark], block: Block, item: Item | None) -> Grant:
        is_open = item is not None and bool(item.windows) and self.objects.get(block.key) is item
        covering = [mark for mark in sorted(marks, key=lambda mark: mark.end_token) if mark.end_token >= block.end]
        refusals = [self.admit(mark, block.key, block.end, item) for mark in covering]
        if not refusals:
            return Grant.NONE
        if None in refusals:
            return Grant.RENEWED if is_open else Grant.OPENED
        return Grant.CAPACITY_EXCEEDED if Grant.CAPACITY_EXCEEDED in refusals else Grant.GAP

    # --- commands ----------------------------------------------------------------------------------------------------

    def put_start(
        self, owner: str, blocks: Sequence[Block], marks: Sequence[Mark], soft: bool, replace: bool, force: bool,
        reply: PutStarted, visible: set[bytes],
    ) -> None:  # fmt: skip
        """`visible` afterwards. With `replace` one block only: in a batch one couldn't tell when the old one went."""
        for index in sorted(range(len(blocks)), key=lambda index: blocks[index].end):
            block, status = blocks[index], reply.statuses[index]
            old, put = self.objects.get(block.key), self.writes.get(block.key)
            if old is not None and not replace and status in (PutStatus.WRITE, PutStatus.NO_SPACE):
                assert self.evictable(old), "evicted for an earlier block of this batch"
                del self.objects[block.key]
                old = None
            if old is not None and not (put is not None and replace):
                old.last = self.now
            target: Item | None = None
            if put is not None and (old is None or replace):
                expected = PutStatus.BUSY
                target = None if put.cancelled else put.item
            elif old is not None and not replace:
                expected, target = PutStatus.EXISTS, old
            elif old is not None and old.windows and not force:
                expected = PutStatus.GUARANTEED
            elif status is PutStatus.NO_SPACE:
                expected = status
                assert block.pages > 1 or not self.could_place(block.pages), "there was room"
            else:
                expected = PutStatus.WRITE
                target = Item(block, reply.offsets[index], soft, self.now)
                self.writes[block.key] = Put(target, owner, self.now + self.put_timeout, force)
            assert status is expected, (block, status, expected)
            if old is not None and replace and block.key not in visible:
                assert self.evictable(old), "evicted for its own replacement, as nothing else would do"
                del self.objects[block.key]
            kept = target is None and block.key in self.objects
            granted = Grant.NONE if kept else self.protect(marks, block, target)
            assert reply.grants[index] is granted, (block, reply.grants[index], granted)

    def put_end(self, owner: str, blocks: Sequence[Block]) -> list[EndStatus]:
        return [self._put_end(owner, block.key) for block in blocks]

    def _put_end(self, owner: str, key: bytes) -> EndStatus:
        put, old = self.writes.get(key), self.objects.get(key)
        if put is None or put.owner != owner:
            return EndStatus.NOT_FOUND if put is None else EndStatus.NOT_OWNER
        if put.cancelled or (old is not None and old.windows and not put.force):
            self.revoke(put)
            return EndStatus.NOT_FOUND if put.cancelled else EndStatus.GUARANTEED
        del self.writes[key]
        if old is not None:
            self.drop(old)
        item = put.item
        item.last = self.now
        item.windows = {prefix: self.now + ttl for prefix, ttl in item.windows.items()}
        self.objects[key] = item
        for prefix in item.windows:
            self.gaps.get(prefix, {}).pop(key, None)
        return EndStatus.OK

    def put_revoke(self, owner: str, blocks: Sequence[Block]) -> list[EndStatus]:
        statuses = []
        for block in blocks:
            put = self.writes.get(block.key)
            if put is None or put.owner != owner:
                statuses.append(EndStatus.NOT_FOUND if put is None else EndStatus.NOT_OWNER)
            else:
                self.revoke(put)
                statuses.append(EndStatus.OK)
        return statuses

    def get(self, owner: str, blocks: Sequence[Block], marks: Sequence[Mark], lease: int, reply: Replicas) -> None:
        found = [self.objects.get(block.key) for block in blocks]
        hits = [item for item in found if item is not None]
        for item in hits:
            item.last = self.now
        assert reply.offsets == [-1 if item is None else item.offset for item in found]
        assert reply.sizes == [0 if item is None else item.block.pages * PAGE for item in found]
        assert bool(reply.lease_id) == bool(hits)
        if hits:
            assert reply.lease_id not in self.leases
            self.leases[reply.lease_id] = Lease(owner, self.now + lease, hits)
        grants = [Grant.NONE] * len(blocks)
        holes: dict[bytes, int] = {}
        for index in sorted(range(len(blocks)), key=lambda index: blocks[index].end):
            end = blocks[index].end
            for mark in marks:
                if mark.end_token < end:
                    continue
                if self.renew_one(mark, end, found[index], holes.get(mark.prefix_id)):
                    grants[index] = Grant.RENEWED
                else:
                    holes.setdefault(mark.prefix_id, end)
        assert reply.grants == (grants if marks else [])

    def renew_one(self, mark: Mark, end: int, item: Item | None, hole: int | None) -> bool:
        if item is None or not item.windows:
            return False
        held = item.windows.get(mark.prefix_id, 0)
        gaps = self.gaps.get(mark.prefix_id, {})
        if not held and gaps and end > min(gaps.values()):
            return False
        if not held and hole is not None and end > hole:
            return False
        item.windows[mark.prefix_id] = max(held, self.now + mark.ttl_ms)
        gaps.pop(item.block.key, None)
        return True

    def renew(self, prefix: bytes, ttl: int) -> Expired:
        held = self.blocks_of(prefix)
        for item in held:
            item.windows[prefix] = max(item.windows[prefix], self.now + ttl)
        return _counts(1 if held else 0, held, 0)

    def expire(self, prefixes: Sequence[bytes], mode: ExpireMode, dry_run: bool) -> Expired:
        live = [prefix for prefix in prefixes if self.live(prefix)]
        held = [item for item in self.objects.values() if set(item.windows) & set(live)]
        reserved = [put for put in self.writes.values() if set(put.item.windows) & set(live)]
        everything = mode is ExpireMode.ALL_HOLDERS
        ending = [item for item in held if everything or set(item.windows) <= set(live)]
        if not dry_run:
            for put in reserved:
                put.cancelled |= mode is ExpireMode.DELETE and set(put.item.windows) <= set(live)
            for item in [*held, *(put.item for put in reserved)]:
                for prefix in [prefix for prefix in item.windows if everything or prefix in live]:
                    self.end_window(item, prefix)
            for item in ending if mode is ExpireMode.DELETE else ():
                self.drop(item)
        return _counts(len(live), ending, len(held) - len(ending))

    def remove(self, blocks: Sequence[Block], force: bool) -> list[EndStatus]:
        statuses = []
        for block in blocks:
            item = self.objects.get(block.key)
            if item is None:
                statuses.append(EndStatus.NOT_FOUND)
            elif item.windows and not force:
                statuses.append(EndStatus.GUARANTEED)
            elif self.leased(item) and not force:
                statuses.append(EndStatus.LEASED)
            else:
                self.drop(item)
                statuses.append(EndStatus.OK)
        return statuses

    def clear(self, start: bytes, force: bool) -> Expired:
        for key, put in self.writes.items():
            if key.startswith(start) and (force or not put.item.windows):
                put.cancelled = True
                self.end_windows(put.item)
        chosen = [item for key, item in self.objects.items() if key.startswith(start)]
        gone = [item for item in chosen if force or not item.windows]
        for item in gone:
            self.drop(item)
        return _counts(0, gone, len(chosen) - len(gone))

    def leave(self, owner: str, dead: bool) -> None:
        for put in [put for put in self.writes.values() if put.owner == owner]:
            self.revoke(put) if dead else self.lose(put)
        if dead:
            self.leases = {lease_id: lease for lease_id, lease in self.leases.items() if lease.owner != owner}
            self.quarantine = [held for held in self.quarantine if held[1] != owner]
        else:
            for lease in self.leases.values():
                if lease.owner == owner:
                    lease.owner = "nobody"  # nobody can release it: it runs out


def _counts(prefixes: int, items: Sequence[Item], kept: int) -> Expired:
    pages = sum(item.block.pages for item in items)
    return Expired(prefixes, len(items), pages * PAGE, kept_blocks=kept)

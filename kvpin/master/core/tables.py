"""All state of the core, wired together. It has no rules of its own."""

from kvpin.master.core.config import CoreConfig
from kvpin.master.core.counters import COUNTERS
from kvpin.master.core.eviction import Evictor, Lru
from kvpin.master.core.leases import Leases
from kvpin.master.core.ledger import Ledger
from kvpin.master.core.memory import Memory
from kvpin.master.core.reports import Reports
from kvpin.master.core.stories import Stories
from kvpin.master.core.types import Object, Session
from kvpin.master.core.windows import Windows


class Tables:
    __slots__ = (
        "config", "counters", "evictor", "leases", "ledger", "memory", "reports", "sessions", "stories", "windows",
    )  # fmt: skip

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.sessions: dict[bytes, Session] = {}
        self.stories = Stories()
        self.reports = Reports()
        self.ledger = Ledger(config.guaranteed_limit_bytes, config.cache_quotas, config.tenant_quotas)
        self.evictor = Evictor(Lru())
        objects: dict[bytes, Object] = {}
        self.windows = Windows(objects, self.ledger, self.evictor, self.stories, self.counters)
        self.memory = Memory(config, objects, self.ledger, self.evictor, self.windows, self.stories, self.counters)
        self.leases = Leases(self.memory.on_unleased, self.counters)

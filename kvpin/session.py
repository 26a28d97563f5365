"""One conversation with a master, from its Welcome on."""

import msgspec

from kvpin.protocol import Welcome

LEASE_ID_BITS = 40  # of the master's own lease ids; a life of a master sees no 10^12 of them


class Session(msgspec.Struct, frozen=True):
    """`life` counts the epochs that this client has seen.

    Callers get lease ids with the life in their upper bits: a new master counts from 1 again, and a late release of
    an old lease must not end a new one of the same number.
    """

    welcome: Welcome
    life: int

    def lease_to_caller(self, lease_id: int) -> int:
        return self.life << LEASE_ID_BITS | lease_id

    def lease_to_wire(self, lease_id: int) -> int | None:
        """None: a lease of an earlier epoch."""
        return lease_id & ((1 << LEASE_ID_BITS) - 1) if lease_id >> LEASE_ID_BITS == self.life else None

"""Every exception that kvpin raises to its users. Foreign errors are mapped here once, at the edge.

Misses, full pools and refused guarantees are *results* (see protocol.py), not exceptions. Engine adapters turn any
`KvpinError` into a miss and a counter: the cache may never fail a request.
"""


class KvpinError(Exception):
    """Base of all of them."""


class ConfigError(KvpinError):
    """A setting is wrong; the text names it, its source, and what to do."""


class ProtocolError(KvpinError):
    """The peer sent something that is not in protocol.py, or refused what we sent (BAD_REQUEST, VERSION)."""


class Unavailable(KvpinError):
    """The master can't be used now; trying later may work. The client's breaker may be open."""


class CallTimeout(Unavailable):
    """No answer before the call's deadline."""


class EpochChanged(Unavailable):
    """The master was started anew; what the old one granted is void. The client re-attaches by itself."""


class LeaseExpired(KvpinError):
    """The copy ended after its lease did, so the bytes can't be trusted. Counts as a miss."""


class SegmentError(KvpinError):
    """The shared memory can't be made or mapped; the text says what to do."""


class MasterBusy(KvpinError):
    """Another master owns these paths."""

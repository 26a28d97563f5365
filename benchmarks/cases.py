"""What is measured. Imported by the measuring processes too, so: the standard library only."""

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
SMALL_BYTES = 4 * KIB  # of objects that only their keys matter of
ROUND_BYTES_MAX = 512 * MIB  # written in one round: half of the pool
ROUND_CALLS_MAX = 200


@dataclass(frozen=True)
class Case:
    """`batch` keys a call, objects of `size_bytes`, and `calls` of them in a round."""

    operation: str  # put | get | exists | lookup
    size_bytes: int
    batch: int
    calls: int

    @property
    def name(self) -> str:
        if self.operation in ("exists", "lookup"):
            return f"{self.operation} {self.batch} keys"
        return f"{self.operation} {self.batch} x {_size(self.size_bytes)}"

    @property
    def moves_bytes(self) -> bool:
        return self.operation in ("put", "get")

    @property
    def keys(self) -> int:
        """How many objects one round writes or reads."""
        return self.batch * (self.calls if self.operation == "put" else 1)


def all_cases() -> list[Case]:
    cases = [
        Case(operation, size, batch, _calls(size * batch))
        for operation in ("put", "get")
        for size in (64 * KIB, MIB, 4 * MIB)
        for batch in (1, 32)
    ]
    cases.append(Case("put", SMALL_BYTES, 128, 50))
    cases += [
        Case(operation, SMALL_BYTES, keys, 200 if keys < 1000 else 50)
        for operation in ("exists", "lookup")
        for keys in (1, 128, 1024)
    ]
    return cases


def slots(size_bytes: int) -> int:
    """How many buffers a process copies from and to in turn: as many as the largest batch that moves bytes."""
    return 128 if size_bytes <= SMALL_BYTES else 32


def _calls(bytes_a_call: int) -> int:
    return max(4, min(ROUND_CALLS_MAX, ROUND_BYTES_MAX // bytes_a_call))


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"

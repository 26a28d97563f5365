"""What became of a request's marks, in tokens and in response headers."""

import msgspec

from kvpin.http.sidefield import MarkedPrefix
from kvpin.limits import HEADER_CHARS_MAX
from kvpin.protocol import Grant, MarkReport

SHORT_TTL_MS = 300_000  # Anthropic's usage knows two classes: up to five minutes, and longer
_REFUSALS = {Grant.CAPACITY_EXCEEDED: "capacity", Grant.GAP: "gap"}


class Written(msgspec.Struct, frozen=True):
    """Newly protected tokens, by the class of the ttl that they are protected for."""

    short_tokens: int
    long_tokens: int

    @property
    def tokens(self) -> int:
        return self.short_tokens + self.long_tokens


class Outcome(msgspec.Struct, frozen=True):
    """`failure`: why no mark could be sent, in a word. `reports`: what the master knows so far; None: it didn't say."""

    prefixes: list[MarkedPrefix] = []
    problems: list[tuple[str, str]] = []
    notes: list[str] = []
    failure: str = ""
    reports: list[MarkReport] | None = None

    @property
    def complete(self) -> bool:
        """Has the fate of every prefix been decided?"""
        found = self._by_id()
        return all(prefix.id in found and _decided(found[prefix.id], prefix) for prefix in self.prefixes)

    @property
    def protected_tokens(self) -> int | None:
        """How far the longest protected run reaches; None if that isn't known."""
        if not self.prefixes:
            return 0
        if self.reports is None:
            return None
        return max((report.covered_tokens for report in self.reports), default=0)

    @property
    def written(self) -> Written | None:
        """Newly protected tokens; None if that isn't known. Prefixes are nested, so the longest has them all."""
        if not self.prefixes:
            return Written(0, 0)
        if self.reports is None or not self.complete:
            return None
        ttls_ms = {prefix.id: prefix.ttl_ms for prefix in self.prefixes}
        opened = max((report.opened_tokens for report in self.reports), default=0)
        long = [r.opened_tokens for r in self.reports if ttls_ms.get(r.prefix_id.hex(), 0) > SHORT_TTL_MS]
        long_tokens = max(long, default=0)
        return Written(opened - long_tokens, long_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """All `x-kvpin-` headers of the response."""
        shown = {"x-kvpin-status": self._status()}
        if self.prefixes:
            shown["x-kvpin-prefixes"] = ", ".join(
                f"{prefix.id};tokens={prefix.end_token};ttl={prefix.ttl_ms // 1000}" for prefix in self.prefixes
            )
        if self.protected_tokens is not None:
            shown["x-kvpin-protected-tokens"] = str(self.protected_tokens)
        if notes := [*(f"{where}: {reason}" for where, reason in self.problems), *self.notes]:
            shown["x-kvpin-notes"] = _header_text("; ".join(notes))
        return [(name.encode(), value.encode()) for name, value in shown.items()]

    def _status(self) -> str:
        reasons = [reason for _, reason in self.problems]
        if not self.prefixes:
            return f"none; reason={self.failure or (reasons[0] if reasons else 'invalid')}"
        if self.reports is None:
            return "unknown; reason=unavailable"
        if not self.complete:
            return "pending"
        reasons += [_REFUSALS.get(report.refusal, "refused") for report in self.reports if report.refusal]
        if not reasons:
            return "ok"
        return f"{'partial' if self.protected_tokens else 'none'}; reason={reasons[-1]}"

    def _by_id(self) -> dict[str, MarkReport]:
        return {report.prefix_id.hex(): report for report in self.reports or []}


def _decided(report: MarkReport, prefix: MarkedPrefix) -> bool:
    return report.covered_tokens >= prefix.end_token or report.refusal in _REFUSALS


def _header_text(text: str) -> str:
    """What a header can carry: printable ASCII, and not too much of it."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)
    return plain if len(plain) <= HEADER_CHARS_MAX else plain[: HEADER_CHARS_MAX - 3] + "..."

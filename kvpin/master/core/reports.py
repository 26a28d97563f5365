"""What each request achieved for its marks, kept until somebody asks for it by the request's token.

A request says its marks in several messages (a lookup, then a put_start per chunk of its prefill), so outcomes add up
per block end: the latest counts, except that a lookup which renewed nothing says nothing, and a block that this
request protected stays "opened" when a later chunk renews it.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvpin.limits import MARKS_MAX, REPORT_ENDS_MAX, REPORTS_MAX
from kvpin.protocol import Grant, Mark, MarkReport, Reported

_GRANTED = (Grant.OPENED, Grant.RENEWED)


class _MarkRecord:
    __slots__ = ("end_token", "ends")

    def __init__(self) -> None:
        self.end_token = 0
        self.ends: dict[int, Grant] = {}  # by end_token of the blocks offered


class Reports:
    __slots__ = ("_by_token", "_ends")

    def __init__(self) -> None:
        self._by_token: OrderedDict[bytes, dict[bytes, _MarkRecord]] = OrderedDict()  # the oldest first
        self._ends = 0  # of all records

    def __len__(self) -> int:
        return len(self._by_token)

    def add(self, token: bytes, mark: Mark, outcomes: Mapping[int, Grant]) -> None:
        """One message's outcomes for one mark, by block end."""
        records = self._by_token.setdefault(token, {})
        if mark.prefix_id not in records and len(records) >= MARKS_MAX:
            return  # no request has so many
        record = records.setdefault(mark.prefix_id, _MarkRecord())
        record.end_token = max(record.end_token, mark.end_token)
        ends = record.ends
        self._ends -= len(ends)
        for end_token, grant in outcomes.items():
            before = ends.get(end_token)
            if before is None or not (grant is Grant.NONE or (before is Grant.OPENED and grant is Grant.RENEWED)):
                ends[end_token] = grant
        self._ends += len(ends)
        while len(self._by_token) > REPORTS_MAX or self._ends > REPORT_ENDS_MAX:
            _, dropped = self._by_token.popitem(last=False)
            self._ends -= sum(len(gone.ends) for gone in dropped.values())

    def of(self, token: bytes) -> Reported:
        records = self._by_token.get(token)
        if records is None:
            return Reported(False, [])
        marks = [_summary(prefix_id, record) for prefix_id, record in records.items()]
        return Reported(True, sorted(marks, key=lambda mark: mark.end_token))


def _summary(prefix_id: bytes, record: _MarkRecord) -> MarkReport:
    covered = opened = renewed = 0
    refusal = Grant.NONE
    for end_token, grant in sorted(record.ends.items()):
        if grant not in _GRANTED:
            refusal = grant
            break
        if grant is Grant.OPENED:
            opened += end_token - covered
        else:
            renewed += end_token - covered
        covered = end_token
    return MarkReport(prefix_id, record.end_token, covered, opened, renewed, refusal)

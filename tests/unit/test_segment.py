"""The shared segment: what lies where, who may have it, and what is left after a crash."""

import contextlib
import fcntl
import gc
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpin import segment as module
from kvpin.errors import SegmentError
from kvpin.segment import HEADER_BYTES, Segment, free_bytes, remove_stale, segment_path

EPOCH = 0xABC123
SIZE_BYTES = 1 << 20


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(segment_path(tmp_path, "p", EPOCH), SIZE_BYTES, EPOCH)
    yield segment
    segment.close()
    segment.unlink()


def test_two_mappings_show_the_same_bytes(made: Segment) -> None:
    other = Segment.attach(made.path, EPOCH)
    made.view(8192, 5)[:] = b"hello"
    other.view(SIZE_BYTES - 3, 3)[:] = b"end"
    assert bytes(other.view(8192, 5)) == b"hello"
    assert bytes(made.data[-3:]) == b"end"
    assert other.size_bytes == SIZE_BYTES == len(other.data)
    other.close()


def test_another_process_sees_the_bytes(made: Segment) -> None:
    made.view(4096, 4)[:] = b"1234"
    code = (
        "import sys; from kvpin.segment import Segment;"
        "s = Segment.attach(sys.argv[1], int(sys.argv[2])); assert bytes(s.view(4096, 4)) == b'1234';"
        "s.view(0, 2)[:] = b'ok'; s.close()"
    )
    subprocess.run([sys.executable, "-c", code, made.path, str(EPOCH)], check=True)
    assert bytes(made.view(0, 2)) == b"ok"
    assert os.path.exists(made.path)  # no resource tracker took it away


def test_address_is_that_of_the_data(made: Segment) -> None:
    import ctypes

    made.view(0, 4)[:] = b"abcd"
    assert ctypes.string_at(made.address, 4) == b"abcd"
    assert made.address % 4096 == 0


def test_mode_and_size(made: Segment) -> None:
    status = os.stat(made.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == HEADER_BYTES + SIZE_BYTES
    assert status.st_blocks * 512 >= status.st_size  # allocated, not sparse


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (0, SIZE_BYTES + 1), (SIZE_BYTES, 1), (1 << 62, 1)])
def test_view_is_bounded(made: Segment, offset: int, size: int) -> None:
    with pytest.raises(SegmentError, match="don't lie"):
        made.view(offset, size)
    assert len(made.view(SIZE_BYTES, 0)) == 0


def test_close_with_exported_views_keeps_their_memory(tmp_path: Path) -> None:
    segment = Segment.create(str(tmp_path / "s"), SIZE_BYTES, EPOCH)
    view = segment.view(0, 4)
    view[:] = b"keep"
    segment.close()
    segment.close()
    assert bytes(view) == b"keep"
    with pytest.raises(SegmentError, match="closed"):
        segment.view(0, 4)
    mapped_before = Path("/proc/self/maps").read_text().count(segment.path)
    del view, segment
    gc.collect()
    assert (mapped_before, Path("/proc/self/maps").read_text().count(str(tmp_path))) == (1, 0)


def test_close_unlocks_even_while_views_are_exported(tmp_path: Path) -> None:
    segment = Segment.create(segment_path(tmp_path, "p", EPOCH), SIZE_BYTES, EPOCH)
    view = segment.view(0, 4)
    segment.close()
    assert remove_stale(tmp_path, "p") == [segment.path]
    assert len(view) == 4


@pytest.mark.parametrize("size_bytes", [0, -4096, 5000])
def test_odd_sizes_are_refused(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(SegmentError, match="multiple of 4096"):
        Segment.create(str(tmp_path / "s"), size_bytes, EPOCH)


def test_progress_reaches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFAULT_SLICE_BYTES", 256 << 10)
    seen: list[tuple[int, int]] = []
    segment = Segment.create(str(tmp_path / "s"), SIZE_BYTES, EPOCH, progress=lambda *step: seen.append(step))
    total = HEADER_BYTES + SIZE_BYTES
    assert [done for done, _ in seen] == [256 << 10, 512 << 10, 768 << 10, 1 << 20, total]
    assert {of for _, of in seen} == {total}
    segment.close()


def test_interrupted_creation_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Segment.create(str(tmp_path / "s"), SIZE_BYTES, EPOCH, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_without_populate_pages_are_touched_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as from an older kernel
    segment = Segment.create(str(tmp_path / "s"), SIZE_BYTES, EPOCH)
    lines = Path("/proc/self/smaps").read_text().split(segment.path)[1].splitlines()
    assert next(line.split()[1] for line in lines if line.startswith("Rss:")) == str(
        (HEADER_BYTES + SIZE_BYTES) // 1024
    )
    segment.close()


def test_too_large_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    wanted = 1 << 50
    with pytest.raises(SegmentError) as caught:
        Segment.create(str(tmp_path / "s"), wanted, EPOCH)
    text = str(caught.value)
    assert str(HEADER_BYTES + wanted) in text
    assert "bytes free" in text
    assert "--shm-size=" in text
    assert "emptyDir" in text
    assert list(tmp_path.iterdir()) == []


def test_no_space_while_allocating_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentError, match=r"bytes free .* the segment needs"):
        Segment.create(str(tmp_path / "s"), SIZE_BYTES, EPOCH)
    assert list(tmp_path.iterdir()) == []


def test_creating_twice_is_refused(made: Segment) -> None:
    with pytest.raises(SegmentError, match="exists already"):
        Segment.create(made.path, SIZE_BYTES, EPOCH)
    assert os.path.exists(made.path)


def test_absent_directory() -> None:
    for call in (
        lambda: Segment.create("/nowhere/s", SIZE_BYTES, EPOCH),
        lambda: remove_stale("/nowhere", "p"),
        lambda: free_bytes("/nowhere"),
    ):
        with pytest.raises(SegmentError, match="segment_dir /nowhere: No such file or directory"):
            call()


def _patch(made: Segment, offset: int, data: bytes) -> None:
    with open(made.path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_attach_refuses_another_epoch(made: Segment) -> None:
    with pytest.raises(SegmentError, match=f"epoch {EPOCH}, not {EPOCH + 1}: the master was started anew"):
        Segment.attach(made.path, EPOCH + 1)


def test_attach_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="there is no segment"):
        Segment.attach(str(tmp_path / "none"), EPOCH)


def test_attach_refuses_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"")
    with pytest.raises(SegmentError, match="no kvpin segment"):
        Segment.attach(str(path), EPOCH)
    path.write_bytes(bytes(8192))
    with pytest.raises(SegmentError, match="no kvpin segment"):
        Segment.attach(str(path), EPOCH)


def test_attach_refuses_links_and_fifos(made: Segment, tmp_path: Path) -> None:
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(made.path)
    os.mkfifo(fifo)
    with pytest.raises(SegmentError, match="can't open"):
        Segment.attach(str(link), EPOCH)
    with pytest.raises(SegmentError, match="no regular file"):
        Segment.attach(str(fifo), EPOCH)


def test_attach_refuses_another_format(made: Segment) -> None:
    _patch(made, 8, struct.pack("<I", 99))
    with pytest.raises(SegmentError, match="format 99, this kvpin reads 1"):
        Segment.attach(made.path, EPOCH)


def test_attach_refuses_a_truncated_segment(made: Segment) -> None:
    os.truncate(made.path, HEADER_BYTES)
    with pytest.raises(SegmentError, match="where its header says"):
        Segment.attach(made.path, EPOCH)


def test_attach_refuses_another_user(made: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SegmentError, match="as one user"):
        Segment.attach(made.path, EPOCH)


def test_stale_segments_are_removed_and_nothing_else(made: Segment, tmp_path: Path) -> None:
    uid = os.geteuid()
    stale = tmp_path / f"kvpin-{uid}-p-1f"
    spared = [f"kvpin-{uid}-p-x-1f", f"kvpin-{uid}-q-1f", f"kvpin-{uid + 1}-p-1f", f"kvpin-{uid}-p-1f.bak", "other"]
    for name in [stale.name, *spared]:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f"kvpin-{uid}-p-2f").symlink_to(tmp_path / "other")
    assert remove_stale(tmp_path, "p") == [str(stale)]
    assert {path.name for path in tmp_path.iterdir()} == {*spared, Path(made.path).name, f"kvpin-{uid}-p-2f"}


def test_stale_means_unlocked(made: Segment, tmp_path: Path) -> None:
    assert remove_stale(tmp_path, "p") == []
    made.close()
    assert remove_stale(tmp_path, "p") == [made.path]


def test_a_creator_that_lost_the_race_against_a_clean_up_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def cleaned_up_first(handle: int, how: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        lock(handle, how)

    path = str(tmp_path / "s")
    monkeypatch.setattr(fcntl, "flock", cleaned_up_first)
    with pytest.raises(SegmentError, match="start again"):
        Segment.create(path, SIZE_BYTES, EPOCH)

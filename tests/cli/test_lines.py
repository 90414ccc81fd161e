"""One text a line: strict reading, and writing whole or not at all."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfexport.cli.terminal import read_lines, write_whole
from tfexport.errors import InputError


def read(data: bytes) -> list[str]:
    return read_lines(io.BytesIO(data), "in.txt")


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_what_is_written_is_read_back(texts: list[str]) -> None:
    texts = [f"a{text}" for text in texts]
    assert read("\n".join(texts).encode()) == texts
    assert read("".join(f"{text}\r\n" for text in texts).encode("utf-8-sig")) == texts


def test_only_line_feeds_end_a_line() -> None:
    assert read("a\u2028b\x0bc\x85d\ne".encode()) == ["a\u2028b\x0bc\x85d", "e"]


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        read(b"a\n\n\xff\nb\n \t\n\xc3(\n")
    assert str(caught.value) == (
        "in.txt: lines 3, 6 are not UTF-8; convert the file, for example with iconv -t utf-8; "
        "lines 2, 5 are empty; remove them, so that input and output agree line by line"
    )
    with pytest.raises(InputError, match=r"lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 990 more are empty"):
        read(b"\n" * 1000)


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_text(data: bytes) -> None:
    with pytest.raises(InputError, match=r"in\.txt: has no text, expected one text per line"):
        read(data)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with write_whole(path) as lines:
        lines += ["ä", "b"]
        assert path.read_text() == "old"
    assert path.read_bytes() == "ä\nb\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_after_a_failure_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(RuntimeError), write_whole(path) as lines:
        lines.append("new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with write_whole(tmp_path / "link") as lines:
        lines.append("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing/out", "No such file or directory"), ("folder", "Is a directory"), ("file/out", "Not a directory")],
)
def test_an_unwritable_output_is_reported_before_any_work(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=rf"cannot be written \({reason}\); choose another output"),
        write_whole(tmp_path / name),
    ):
        pytest.fail("the block ran")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    no_space = r"/dev/full: cannot be written \(No space left on device\)"
    with pytest.raises(InputError, match=no_space), write_whole(Path("/dev/full")) as lines:
        lines.append("x")
    assert Path("/dev/full").is_char_device(), "not replaced"


def test_an_endless_stream_is_refused() -> None:
    with (
        Path("/dev/zero").open("rb") as endless,
        pytest.raises(InputError, match=r"in\.txt has more than 268435456 bytes"),
    ):
        read_lines(endless, "in.txt")

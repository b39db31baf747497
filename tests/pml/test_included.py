"""Modules take their text from files under one root, and from nowhere else."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from pc_rag import pml
from pc_rag.errors import SchemaError
from pc_rag.pml import Module, Text
from pc_rag.pml.included import MAX_FILE_BYTES, IncludedFiles, IncludeError


@pytest.fixture
def root(tmp_path):
    """A root with one file in a folder, and one beside the root."""
    folder = tmp_path / "root" / "inner"
    folder.mkdir(parents=True)
    (folder / "file.txt").write_text("inside", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("outside", encoding="utf-8")
    return tmp_path / "root"


def module_of(src, root):
    document = f'<schema name="s">\n  <module name="m" src="{src}"/></schema>'
    (module,) = pml.parse_schema(document, src_root=root).children
    return module


def problem_of(src, root):
    with pytest.raises(SchemaError) as caught:
        module_of(src, root)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (2, 3)
    assert problem.message.startswith("src='")
    return problem.message


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "  no\twhitespace rule \r\nholds\r here\n\n",
        "<module name='x'>AT&T &amp; ]]></module>",
        "\ufeff汉字 😀 \x00\x0c",
        "<|im_end|>",
    ],
)
@pytest.mark.parametrize("preserve", ["", ' xml:space="preserve"'])
def test_text_is_kept_exactly_when_it_is_included(root, text, preserve):
    """Every character of the file is text of the module (pitfall 12)."""
    (root / "inner" / "any.txt").write_bytes(text.encode())
    document = f'<schema name="s"{preserve}><module name="m" src="inner/any.txt"/></schema>'
    assert pml.parse_schema(document, src_root=root).children == (Module("m", (Text(text),)),)


def test_module_is_empty_when_its_file_is(root):
    """There are no empty texts."""
    (root / "empty").touch()
    assert module_of("empty", root).children == ()


def test_text_is_located_when_it_is_included(root):
    """It has the place of its tag, in the document that includes it."""
    (text,) = module_of("inner/file.txt", root).children
    assert (text.location.line, text.location.column) == (2, 3)


def test_schema_file_includes_files_when_a_root_is_given(root):
    """The root may be given as text, and may be reached by a link."""
    (root / "s.xml").write_text('<schema name="s"><module name="m" src="inner/file.txt"/></schema>')
    (root.parent / "link").symlink_to(root)
    for given in (root, str(root), root.parent / "link"):
        schema = pml.read_schema(root / "s.xml", src_root=given)
        assert schema.children == (Module("m", (Text("inside"),)),)
    with pytest.raises(SchemaError, match="pass src_root"):
        pml.read_schema(root / "s.xml")


@pytest.mark.parametrize(
    "src",
    [
        "../secret.txt", "inner/../../secret.txt", "inner/..", "..", ".", "./inner/file.txt", "",
        "inner//file.txt", "inner/file.txt/", "/etc/passwd", "inner\\file.txt", "..\\secret.txt",
    ],
)  # fmt: skip
def test_path_is_refused_when_it_is_not_plainly_below_the_root(root, src):
    """No way up, no absolute path, one spelling for one file."""
    assert "is not a relative path below the root" in problem_of(src, root)


@pytest.mark.parametrize("src", ["link.txt", "folder/secret.txt", "inner/within.txt", "loop/x"])
def test_link_is_refused_when_it_lies_below_the_root(root, src):
    """Not even one that stays inside: what a link names can change."""
    (root / "link.txt").symlink_to(root.parent / "secret.txt")
    (root / "folder").symlink_to(root.parent)
    (root / "inner" / "within.txt").symlink_to("file.txt")
    (root / "loop").symlink_to("loop")
    assert "leads over a link" in problem_of(src, root)


def test_file_is_refused_when_it_is_missing(root):
    """Missing files and folders, a file used as a folder, a missing root, an endless name."""
    assert "No such file" in problem_of("absent.txt", root)
    assert "No such file" in problem_of("absent/file.txt", root)
    assert "Not a directory" in problem_of("inner/file.txt/x", root)
    assert "No such file" in problem_of("file.txt", root / "absent")
    assert "too long" in problem_of("x" * 100_000, root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_is_refused_when_it_may_not_be_read(root):
    """The reason is the system's."""
    (root / "inner" / "file.txt").chmod(0)
    assert "Permission denied" in problem_of("inner/file.txt", root)


def test_file_is_refused_when_it_is_not_regular(root):
    """A folder, a pipe that nobody writes to: none is waited for."""
    os.mkfifo(root / "pipe")
    assert "is not a regular file" in problem_of("inner", root)
    assert "is not a regular file" in problem_of("pipe", root)


@pytest.mark.parametrize("num_bytes", [MAX_FILE_BYTES, MAX_FILE_BYTES + 1, 1 << 40])
def test_file_is_refused_when_it_is_too_large(root, num_bytes):
    """The size is looked at before a byte is read."""
    with (root / "large").open("wb") as file:
        file.truncate(num_bytes)
    if num_bytes <= MAX_FILE_BYTES:
        assert len(module_of("large", root).children[0].text) == num_bytes
    else:
        tracemalloc.start()
        message = problem_of("large", root)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert f"has {num_bytes:,} bytes; at most {MAX_FILE_BYTES:,} are allowed" in message
        assert peak_bytes < 1_000_000


def test_byte_is_located_when_a_file_is_not_utf8(root):
    """Line and column within the file, beside those of the tag."""
    (root / "latin").write_bytes("eins\r\nzw\u00f6lf".encode("latin-1"))
    assert "byte 0xf6 at its line 2, column 3 is not UTF-8" in problem_of("latin", root)


def test_every_problem_is_reported_when_files_have_many(root):
    """Files are no exception to all problems at once."""
    with pytest.raises(SchemaError) as caught:
        pml.parse_schema(
            '<schema name="s"><module name="1"/>\n<module name="a" src="x"/>\n'
            '<module name="b" src="a\tb"/>\n<module name="c" src="../x"/>\n<b/></schema>',
            src_root=root,
        )
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3, 4, 5]


def open_descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are seen in /proc")
def test_no_file_stays_open_when_files_are_refused(root):
    """Neither good nor refused files leave descriptors behind."""
    os.mkfifo(root / "pipe")
    before = open_descriptors()
    module_of("inner/file.txt", root)
    for src in ("absent/x", "inner", "pipe", "inner/file.txt/x"):
        problem_of(src, root)
    assert open_descriptors() == before


def test_file_is_refused_when_it_grows_behind_the_look_at_its_size(tmp_path, monkeypatch):
    """Its size is told before it is read, and no more than is allowed is read of it."""
    (tmp_path / "a.txt").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    real = os.fstat

    def before(file):
        status = list(real(file))
        status[stat.ST_SIZE] = 5
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", before)
    with pytest.raises(IncludeError, match="10,000,001 bytes; at most 10,000,000"):
        IncludedFiles(tmp_path).text("a.txt")

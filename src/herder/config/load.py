"""Reads a recipe and its overrides into a RunConfig, strictly.

Owns how a mistake in a recipe is told: every violation in one ConfigError, each with the file and
line or the override it came from, the path of the key, what was given and what would do. Knows the
records only through their fields.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from herder.config.catalog import gpu_names, near_gpu
from herder.config.run import RunConfig
from herder.config.strict_yaml import KeyPath, read_yaml
from herder.errors import ConfigError, close_match


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe at `path` with `--set a.b=c` overrides laid over it, in order.

    Override values are YAML (`null`, `1e-4`, `[1, 2]`). Raises ConfigError that lists all
    violations together: unknown keys with a close match, wrong types, values out of range.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such recipe.{_near_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this recipe cannot be read: {error}.") from None
    tree, lines = read_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a recipe is a mapping of keys such as `model:` and `train:`, "
            f"given {_told(tree)}."
        )
    origins = {key: f"{path}:{line}" for key, line in lines.items()}
    problems: list[str] = []
    for override in overrides:
        try:
            key, value = parse_override(override)
        except ConfigError as error:
            problems.append(str(error))
            continue
        _put(tree, key, value)
        origins[key] = f"--set {override}"
    return _validated(tree, origins, problems, where=str(path))


def parse_override(override: str) -> tuple[KeyPath, Any]:
    """`train.steps=10` as (("train", "steps"), 10). Raises ConfigError when it has no such form."""
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or not all(key):
        raise ConfigError(
            f"--set {override}: give a key path and a value, for example --set train.steps=10."
        )
    value, _ = read_yaml(text, where=f"--set {override}")
    return key, value


def _put(tree: dict[Any, Any], key: KeyPath, value: Any) -> None:
    """Sets one path; a scalar on the way (`layout: auto`) gives way to a mapping."""
    for part in key[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = dict[Any, Any]()
        tree = tree[part]
    tree[key[-1]] = value


def _validated(
    tree: dict[Any, Any], origins: Mapping[KeyPath, str], problems: list[str], *, where: str
) -> RunConfig:
    config = None
    problems += [_placed(path, text, origins, where) for path, text in _bad_values(tree, ())]
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems += [_placed(path, text, origins, where) for path, text in _violations(error, tree)]
    problems += [_placed(path, text, origins, where) for path, text in _unknown_gpu(tree)]
    if problems or config is None:
        unique = list(dict.fromkeys(problems))
        head = f"{len(unique)} mistakes:\n" if len(unique) > 1 else ""
        raise ConfigError(head + "\n".join(unique))
    return config


def _placed(path: KeyPath, text: str, origins: Mapping[KeyPath, str], where: str) -> str:
    """One violation behind the nearest known origin of its key."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            where = origins[path[:length]]
            break
    return f"{where}: {'.'.join(path)}: {text}" if path else f"{where}: {text}"


def _bad_values(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Keys that are not text, and numbers that are not finite."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield (*path, str(key)), f"a key is a word, given {_told(key)}."
            yield from _bad_values(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _bad_values(inner, (*path, str(index)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, given {value}."


def _unknown_gpu(tree: dict[Any, Any]) -> Iterator[tuple[KeyPath, str]]:
    cluster = tree.get("cluster")
    name = cluster.get("gpu") if isinstance(cluster, dict) else None
    if isinstance(name, str) and name.lower() not in gpu_names():
        yield (
            ("cluster", "gpu"),
            f"{name!r} is not a known device. {near_gpu(name)} "
            "A mapping with the device's own figures does too.",
        )


def _violations(error: ValidationError, tree: Any) -> Iterator[tuple[KeyPath, str]]:
    """Pydantic's errors with union branches resolved, in herder's words."""
    for item in error.errors(include_url=False):
        located = _locate(item["loc"], tree)
        if located is not None:
            path, record = located
            yield path, _worded(item, path, record)


def _locate(loc: Sequence[Any], tree: Any) -> tuple[KeyPath, type[BaseModel]] | None:
    """The key path of an error and the record it lies in; None for the branch not meant.

    Behind a field of several types pydantic's location names the branch it tried. Of these, a
    mapping means the record and anything else means the rest.
    """
    record: Any = RunConfig
    path: list[str] = []
    value, parts = tree, list(loc)
    while parts:
        name = parts.pop(0)
        path.append(str(name))
        value = value.get(name) if isinstance(value, dict) else None
        field = record.model_fields.get(name) if record is not None else None
        if field is None:
            continue
        branches = [b for b in _branches(field.annotation) if b is not type(None)]
        records = [b for b in branches if isinstance(b, type) and issubclass(b, BaseModel)]
        if len(branches) > 1 and parts:
            tag = parts.pop(0)
            meant = {r.__name__ for r in records} if isinstance(value, dict) else None
            if (meant is None and tag in {r.__name__ for r in records}) or (
                meant is not None and tag not in meant
            ):
                return None
        if parts:
            record = records[0] if records else None
    return tuple(path), record or RunConfig


def _branches(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _worded(item: Any, path: KeyPath, record: type[BaseModel]) -> str:
    kind, given, context = item["type"], item.get("input"), item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key. {_known_key(path[-1], record)}"
    if kind == "missing":
        return "this key is missing."
    if kind == "value_error":
        return f"{context['error']}."
    must = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "model_type": "a mapping of keys",
        "dict_type": "a mapping of keys",
        "literal_error": f"one of {context.get('expected')}",
        "greater_than": f"greater than {context.get('gt')}",
        "greater_than_equal": f"at least {context.get('ge')}",
        "less_than": f"less than {context.get('lt')}",
        "less_than_equal": f"at most {context.get('le')}",
    }.get(kind)
    told = _told(given)
    suggestion = ""
    if kind == "literal_error" and isinstance(given, str):
        choices = [c for c in _choices(record, path[-1]) if isinstance(c, str)]
        match = close_match(given, choices) if choices else ""
        suggestion = f" {match}" if match.startswith("Did") else ""
    if must and path[-1] in record.model_fields and not isinstance(given, dict):
        branches = _branches(record.model_fields[path[-1]].annotation)
        records = [b for b in branches if isinstance(b, type) and issubclass(b, BaseModel)]
        must += ", or a mapping of keys" if records and kind != "model_type" else ""
    return f"must be {must}, given {told}.{suggestion}" if must else f"{item['msg']}, given {told}."


def _choices(record: type[BaseModel], name: str) -> Iterator[Any]:
    field = record.model_fields.get(name)
    for branch in _branches(field.annotation) if field else ():
        if get_origin(branch) is Literal:
            yield from get_args(branch)


def _known_key(name: str, record: type[BaseModel]) -> str:
    """A close match in the same record, or the place where a key of that name belongs."""
    match = close_match(name, record.model_fields)
    if match.startswith("Did"):
        return match
    elsewhere = [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        for branch in _branches(field.annotation)
        if isinstance(branch, type)
        and issubclass(branch, BaseModel)
        and name in branch.model_fields
    ]
    return f"Did you mean {elsewhere[0]!r}?" if elsewhere else match


def _told(value: Any) -> str:
    """A given value and what it is, in a recipe's words."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"the text {value!r}" if isinstance(value, str) else str(value)


def _near_files(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else None
    names = [p.name for p in folder.glob("*.yaml")] if folder else []
    return f" {close_match(path.name, names)}" if names else ""

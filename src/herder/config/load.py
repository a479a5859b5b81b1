"""Reads a recipe and its overrides into a RunConfig, and lays overrides over an architecture.

Owns how a mistake in either is told: every violation in one ConfigError, each with the file and
line or the override it came from, the path of the key, what was given and what would do. Knows the
records only through their fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import gpu_names, near_gpu
from herder.config.run import RunConfig
from herder.config.strict_yaml import KeyPath, read_yaml
from herder.errors import ConfigError, close_match

_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "literal_error": "one of {expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "string_too_short": "text that is not empty",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
"""Pydantic's kinds of errors in herder's words."""


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


def override_architecture(
    architecture: ArchitectureConfig, overrides: Mapping[str, Any] | Sequence[str], *, where: str
) -> ArchitectureConfig:
    """The architecture with some of its fields replaced, valid as the record itself is.

    overrides: a tree of fields, or --set texts such as moe.num_experts_per_token=4. Raises
    ConfigError that lists all violations. Whether weights still fit shows when they are loaded.
    """
    given = dict[Any, Any]()
    if isinstance(overrides, Mapping):
        given.update(overrides)
    else:
        for override in overrides:
            _put(given, *parse_override(override))
    tree = architecture.model_dump(mode="json")
    absent = [name for name in given if name in tree and tree[name] is None]
    _lay_over(tree, given)
    try:
        return ArchitectureConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        found = [_told_violation(item, tree, ArchitectureConfig) for item in error.errors()]
        told = dict(
            (path[0], "this architecture has none.")
            if path and path[0] in absent
            else (".".join(path), text)
            for path, text in found
        )
        lines = [": ".join(filter(None, (where, *item))) for item in told.items()]
        raise ConfigError("\n".join(lines)) from None


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


def _lay_over(tree: dict[Any, Any], overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        inner = tree.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            _lay_over(inner, value)
        else:
            tree[name] = value


def _validated(
    tree: dict[Any, Any], origins: Mapping[KeyPath, str], problems: list[str], *, where: str
) -> RunConfig:
    found: list[tuple[KeyPath, str]] = []
    config = None
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        found += [_told_violation(item, tree, RunConfig) for item in error.errors()]
    found += _unknown_gpu(tree)
    for path, text in found:
        # The nearest known origin of the key: an override, or a line of the recipe.
        known = (origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins)
        problems.append(": ".join(filter(None, (next(known, where), ".".join(path), text))))
    if problems or config is None:
        head = f"{len(problems)} mistakes:\n" if len(problems) > 1 else ""
        raise ConfigError(head + "\n".join(problems))
    return config


def _unknown_gpu(tree: dict[Any, Any]) -> Iterator[tuple[KeyPath, str]]:
    cluster = tree.get("cluster")
    name = cluster.get("gpu") if isinstance(cluster, dict) else None
    if isinstance(name, str) and name.lower() not in gpu_names():
        yield (
            ("cluster", "gpu"),
            f"{name!r} is not a known device. {near_gpu(name)} "
            "A mapping with the device's own figures does too.",
        )


def _told_violation(item: Any, tree: Any, root: type[BaseModel]) -> tuple[KeyPath, str]:
    """The key path of one of pydantic's errors, and what is wrong there."""
    path: list[str] = []
    record: type[BaseModel] | None = None
    inner: list[type[BaseModel]] = [root]
    value = tree
    for part in item["loc"]:
        if not isinstance(value, dict):
            break
        if part not in value and part == value.get("kind"):  # which of a field's records it is
            inner = [each for each in inner if each.model_fields["kind"].default == part]
        elif part in value or (item["type"] == "missing" and not str(part).startswith("<")):
            # else the form of a field of two, or of a value that may be any JSON
            path.append(str(part))
            record, value = next(iter(inner), None), value.get(part)
            field = record.model_fields.get(part) if record else None
            inner = list(_records_in(field.annotation)) if field else []
    name = path[-1] if path else ""
    return tuple(path), _worded(item, name, record or root, root, accepts_record=bool(inner))


def _records_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The records that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)


def _worded(
    item: Any, name: str, record: type[BaseModel], root: type[BaseModel], *, accepts_record: bool
) -> str:
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key. {_known_key(name, record, root)}"
    if kind == "missing":
        return "this key is missing."
    if kind == "invalid_key" or item["loc"][-1:] == ("[key]",):
        return f"a key is a word, given {_told(given)}."
    if kind == "value_error":
        return f"{context['error']}."
    must = _MUST_BE.get(kind)
    if must is None:
        return f"{item['msg']}, given {_told(given)}."
    or_record = ", or a mapping of keys" if accepts_record and kind != "model_type" else ""
    choices = re.findall("'([^']*)'", context.get("expected", ""))
    match = close_match(given, choices) if choices and isinstance(given, str) else ""
    suggestion = f" {match}" if match.startswith("Did") else ""
    return f"must be {must.format(**context)}{or_record}, given {_told(given)}.{suggestion}"


def _known_key(name: str, record: type[BaseModel], root: type[BaseModel]) -> str:
    """A close match in the same record, or the place where a key of that name belongs."""
    match = close_match(name, record.model_fields)
    for section, field in root.model_fields.items():
        for inner in _records_in(field.annotation):
            if not match.startswith("Did") and name in inner.model_fields:
                return f"Did you mean '{section}.{name}'?"
    return match


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

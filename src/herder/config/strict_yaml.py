"""YAML as people mean it: reads text into plain values, and remembers the line of every key.

Owns the few ways in which herder's YAML differs from PyYAML's default (YAML 1.1): a key given twice
is an error, `1e-4` is a number, `on`, `off`, `yes` and `no` are words, and dates stay text. Knows
nothing of records.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from herder.errors import ConfigError

KeyPath = tuple[str, ...]

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """PyYAML's safe loader with the resolvers of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def read_yaml(text: str, *, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """The document's value, and the 1-based line of each key path in it.

    Raises ConfigError naming `where` and the line when the text is no YAML, holds several
    documents, or gives a key twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[KeyPath, int] = {}
        _record_lines(node, (), lines, where)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{where}{_mark(error)}: this is not valid YAML: {_reason(error)}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{where}: a list or mapping in it holds itself.") from None
    finally:
        loader.dispose()


def _record_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int], where: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _record_lines(child, (*path, str(index)), lines, where)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, child in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        inner = (*path, name)
        if inner in lines:
            raise ConfigError(
                f"{where}:{line}: {'.'.join(inner)} is given twice, first in line {lines[inner]}. "
                "Keep one."
            )
        lines[inner] = line
        _record_lines(child, inner, lines, where)


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None)
    return str(problem or error).strip().rstrip(".") + "."

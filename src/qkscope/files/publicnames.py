"""Public versions of run.json and summary.json: without names of documents and paths of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from qkscope.files.hub import HUB_ID
from qkscope.files.runfolder import PUSHED

_LOCAL_KEYS = frozenset({"path", "results_dir", "file"})
"""Keys whose values are paths on this machine."""
_LOCATION_KEYS = frozenset({"dataset", "texts"})
"""Keys whose values are paths on this machine or on the Hub."""
_PATH = re.compile(r"(?<![\w:/.~-])(?:~|\.{1,2})?/[^\s'\"\[\](),;]*")


def public_manifest(
    manifest: dict[str, Any], *, names: bool, digest: str, further: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a manifest whose documents are named by the beginning of their digest, or with ``names`` by file name.

    ``digest`` is that of run.json; ``further`` lists removals from other files. If nothing is removed, the manifest is
    returned unchanged.
    """
    documents = [entry | _public_name(entry, names=names) for entry in manifest["documents"]]
    renamed = {
        str(old.get("name")): str(new.get("name")) for old, new in zip(manifest["documents"], documents, strict=True)
    }
    model = dict(manifest["model"])
    model |= {"id": _public_location(model["id"])} if isinstance(model.get("id"), str) else {}
    public = manifest | {"model": model, "documents": documents}
    if "left_out" in manifest:
        public["left_out"] = [{key: _renamed(value, renamed) for key, value in e.items()} for e in manifest["left_out"]]
    changes = {
        "names of documents": documents != manifest["documents"] and not names,
        "folders of documents": documents != manifest["documents"] and names,
        "folder of the model": model != manifest["model"],
        "paths of documents left out": public.get("left_out") != manifest.get("left_out"),
    }
    removed = [*(name for name, changed in changes.items() if changed), *further]
    if not removed:
        return manifest
    earlier = manifest.get(PUSHED, {"left_out": [], "sha256": digest})
    return public | {PUSHED: earlier | {"left_out": [*earlier["left_out"], *removed]}}


def public_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary in which each path is replaced by its last part, without the run time."""
    folders = {path: PurePath(path).name for path in _paths_in(summary)}
    return {key: _without_paths(value, folders) for key, value in summary.items() if key != "wall_seconds"}


def _public_name(entry: Mapping[str, Any], *, names: bool) -> dict[str, str]:
    if "name" not in entry:
        return {}
    return {"name": PurePath(str(entry["name"])).name if names else str(entry.get("digest", ""))}


def _public_location(location: str) -> str:
    """A location on the Hub unchanged; of any other, the last part."""
    on_hub = location.startswith("hf://") or (HUB_ID.fullmatch(location) is not None and not Path(location).exists())
    return location if on_hub else PurePath(location).name


def _paths_in(value: Any) -> Iterator[str]:
    """Yield the values of all keys ``path``, at any depth."""
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == "path" and isinstance(inner, str) and inner)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _paths_in(inner)


def _without_paths(value: Any, folders: Mapping[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(inner, folders, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner, folders, key) for inner in value]
    if not isinstance(value, str):
        return value
    if key in _LOCAL_KEYS:
        return PurePath(value).name
    return _public_location(value) if key in _LOCATION_KEYS else _renamed(value, folders)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Replace these names in a text, and any other path by its last part."""
    if not isinstance(value, str):
        return value
    for name in sorted(names, key=len, reverse=True):
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name].replace("\\", "\\\\"), value)
    return _PATH.sub(lambda match: PurePath(match[0]).name, value)

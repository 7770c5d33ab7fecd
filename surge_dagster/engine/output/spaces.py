"""The vector spaces of an output: one folder each, described by its `space.json`.

The first run that writes to a space resolves it and writes `space.json`. Later runs, sensors and
readers find the space by their settings, without loading the model. The twelve hex digits of the
name identify a space, not the slug: the same weights under another model name use the folder that
exists.

When the content of a model changes behind its name, the same settings resolve to a second space.
The space that was claimed last counts, and only a run that an operator launches claims another one.
`space.json` lists the requests that its space answers, and has a number, the turn: among the spaces
that answer a request the one with the highest turn counts, and the first by name where turns are
equal, as after two concurrent claims.

`space.json` also names the catalog (`catalog_record`) and, if the model was given as a folder, that
folder. Both are those of the last run, and no part of the space's identity. Nor is the
tokenizer, which is that of the first run: files and versions of libraries that the model's digest
does not cover may change it, and then a run is refused. For the same reason a space of an encoder
behind HTTP has the vectors of five texts there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import EncodingSpec, Space, space_from_json
from surge_dagster.engine.output.catalog_record import CatalogRecord, catalog_from_json
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.urls import expanded

log = logging.getLogger(__name__)

SPACE_FILE = "space.json"


def read_document(store: Store, name: str) -> Any:
    """Return what an object holds; raises `FileNotFoundError`, or `ValueError` if it is damaged."""
    with store.open(name) as source:
        return json.loads(source.read())


def write_document(
    store: Store, name: str, document: Mapping[str, Any], still_wanted: Callable[[], None]
) -> None:
    """Publish a small JSON object as `Upload.publish` does; raises `TransientError` if the disk
    does not take it."""
    try:
        with store.create(name) as upload:
            upload.sink.write(json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")
            upload.publish(still_wanted)
        store.sync(name.rpartition("/")[0])
    except OSError as error:
        raise TransientError(
            f"cannot write {store.location(name)!r}: {error}. Make room on the disk, then run "
            "again."
        ) from error


def is_folder_of_space(store: Store) -> bool:
    """Return whether an output is not one, but the folder of one of its spaces."""
    return any(stored.name == SPACE_FILE for stored in store.list(""))


def list_spaces(store: Store) -> list[Space]:
    """Return every space of the output, by name; raises `ConfigError` for a damaged space.json."""
    return [described.space for described in _all_described(store)]


def find_space(store: Store, spec: EncodingSpec) -> Space | None:
    """Return the space that was claimed for this spec last, or None if the output has none yet;
    never a derived one.

    Raises:
        ConfigError: the model is a folder that is missing, so that its space is not known.
    """
    known = [described for described in _all_described(store) if not described.space.derived]
    request = spec.as_dict()
    answering = [described for described in known if request in described.requests]
    if answering:
        return max(answering, key=lambda described: described.turn).space
    if known and spec.endpoint is None and expanded(spec.model).is_dir():
        own = _of_spec(known, spec.resolve().spec_sha256)
        return own and own.space
    if known and spec.model.startswith(("/", "~", ".")):
        raise ConfigError(
            f"the model's folder {spec.model!r} is not there. Put it back, or correct the setting "
            "model."
        )
    return None


def space_of_spec(store: Store, spec_sha256: str) -> Space | None:
    """Return the space with this spec as the output names it; None if the output has none."""
    own = _of_spec(_all_described(store), spec_sha256)
    return own and own.space


def _of_spec(known: Iterable[_Described], spec_sha256: str) -> _Described | None:
    for described in known:
        if described.space.spec_sha256 == spec_sha256:
            return described
    return None


def claim_derived(store: Store, space: Space) -> None:
    """Prepare the folder of a derived space and describe the space there, with the catalog of its
    parent."""
    assert space.derived
    own = _in_its_folder(store, space)
    parent = _described(store, space.derived.parent)
    store.prepare(space.name)
    store.sweep(space.name)
    document = space.to_json()
    if own is not None:
        document |= own.document
    for shared in ("catalog", "model_folder", "tokenizer", "probes"):
        if parent is not None and shared in parent.document:
            document[shared] = parent.document[shared]
    if own is None or document != own.document:
        _write(store, space, document, own.catalog if own else None)


def recorded_catalog(store: Store, space: Space) -> CatalogRecord | None:
    """Return the catalog whose embeddings a space holds; None if no run has recorded it."""
    described = _described(store, space.name)
    return described.catalog if described else None


def claim_space(store: Store, space: Space, catalog: CatalogRecord | None = None) -> Space:
    """Prepare the space's folder for writing and describe the space there; from now on its request
    means this space. Return the space as this output has it.

    Args:
        catalog: what its files are made from; None: it is neither compared nor recorded.

    Raises:
        ConfigError: the output is itself a space's folder, cannot be written, has another space
            under that name, or has this one with another catalog or from another tokenizer.
    """
    if is_folder_of_space(store):
        raise ConfigError(
            f"the output {store.url!r} is the folder of one space; give the folder above it, which "
            "holds all spaces."
        )
    known = _all_described(store)
    # a concurrent run may have begun it by now
    own = _of_spec(known, space.spec_sha256) or _in_its_folder(store, space)
    if own is None:
        before = find_space(store, space.requested)
        # else a concurrent run has begun it now
        if before is not None and before.spec_sha256 != space.spec_sha256:
            before.require_probes(space.probes)
            log.warning("%s", _why(space, before))
    else:
        own.space.require_tokenizer(space.tokenizer)
        own.space.require_probes(space.probes)
        space = replace(space, name=own.space.name)
    described = own or _Described(space, space.to_json())
    document = _claimed(described, known, space)
    if catalog is not None:
        document |= described.holding(catalog, store)

    store.prepare(space.name)
    if own is None or document != own.document:
        _write(store, space, document, described.catalog)
    return space


def _claimed(described: _Described, known: Iterable[_Described], space: Space) -> dict[str, Any]:
    """Return the document of a space whose request means it from now on."""
    document = dict(described.document)
    document |= _meaning(described, known, space.requested.as_dict())
    if space.model_folder:
        document["model_folder"] = space.model_folder
    if space.tokenizer:
        document.setdefault("tokenizer", space.tokenizer)
    if space.probes:
        document.setdefault("probes", list(space.probes))
    return document


def _meaning(
    own: _Described, known: Iterable[_Described], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of a space's document that make a request mean this space."""
    entries: dict[str, Any] = {}
    if request not in own.requests:
        entries["also_requested"] = [*own.requests[1:], request]
    for other in known:
        answers = other.space.name != own.space.name and request in other.requests
        if answers and other.turn >= entries.get("turn", own.turn):
            entries["turn"] = other.turn + 1
    return entries


@dataclass(frozen=True, slots=True)
class _Described:
    """A space with the content of its `space.json`."""

    space: Space
    document: dict[str, Any]

    @property
    def catalog(self) -> CatalogRecord | None:
        recorded = self.document.get("catalog")
        if recorded is None:
            return None
        return catalog_from_json(recorded)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [self.space.requested.as_dict(), *self.document.get("also_requested", [])]

    @property
    def turn(self) -> int:
        return self.document.get("turn", 0)

    def holding(self, catalog: CatalogRecord, store: Store) -> dict[str, Any]:
        """Return the entry of the space with this catalog; raises `ConfigError` if it holds another
        one."""
        known = catalog.for_output(store).require_same(self.catalog, self.space.name, store)
        return {"catalog": known.to_json()}


def _all_described(store: Store) -> list[_Described]:
    described = (_described(store, folder) for folder in store.folders())
    return [space for space in described if space is not None]


def _described(store: Store, folder: str) -> _Described | None:
    """Return the space of a folder; None if the folder has no `space.json`."""
    name = f"{folder}/{SPACE_FILE}"
    try:
        document = read_document(store, name)
        space = space_from_json(document)
        described = _Described(space, document)
        if not isinstance(described.turn, int):
            raise TypeError("turn must be a number")
        _ = described.catalog
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{store.location(name)!r} cannot be read: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError, ConfigError) as error:
        raise ConfigError(f"{store.location(name)!r} cannot be used: {error}") from error
    if space.name != folder:
        raise ConfigError(
            f"{store.location(name)!r} describes the space {space.name!r}: the folder was renamed "
            "or the file copied. Rename the folder back, or move it away."
        )
    return described


def _why(space: Space, before: Space) -> str:
    begun = f"{space.requested.model} begins the space {space.name} beside {before.name}"
    why = model_difference(space, before)
    if space.model_digest == before.model_digest and _prompts(space) != _prompts(before):
        why += f"; set document_prompt and query_prompt to those to stay with {before.name}"
    return f"{begun}: {why}"


def require_model(loaded: Space, space: Space) -> None:
    """Refuse a model that does not encode into a space, or into the one it was derived from."""
    if loaded.spec_sha256 == space.encoder_sha256:
        space.require_probes(loaded.probes)
        return
    raise ConfigError(
        f"the model {loaded.requested.model!r} encodes into {loaded.name}, not into "
        f"{space.encoded_name}: {model_difference(loaded, space)}. Restore it, or name the "
        "settings of the other space."
    )


def model_difference(space: Space, before: Space) -> str:
    """Return what has changed in the model since the same settings meant another space."""
    if space.model_digest != before.model_digest:
        return "the model's content has changed"
    if _prompts(space) != _prompts(before):
        now, was = (" and ".join(map(repr, _prompts(each))) for each in (space, before))
        return f"the model's prompts for documents and queries are {now} and were {was}"
    changed: list[str] = []
    for name in ("max_length", "normalize", "dimension"):
        now = getattr(space, name)
        was = getattr(before, name)
        if now != was:
            changed.append(f"the model's {name} is {now} and was {was}")
    return "; ".join(changed)


def nearest_spaces(spec: EncodingSpec, spaces: Iterable[Space]) -> str:
    """Return the spaces, each with the settings that differ from a spec's."""
    now = spec.as_dict()
    folder = expanded(spec.model)
    if folder.is_dir():
        now["model"] = str(folder.resolve())
    lines: list[str] = []
    for space in spaces:
        was = replace(space.requested, model=space.model_folder or space.requested.model).as_dict()
        names = [name for name in {**was, **now} if now.get(name) != was.get(name)]
        values = [
            f"{name} is {_value(now.get(name))} and was {_value(was.get(name))}" for name in names
        ]
        difference = ", ".join(values) or "the content of the model was another one"
        lines.append(f"{space.name} ({difference})")
    return "; ".join(lines)


def _value(setting: Any) -> str:
    return "unset" if setting is None else repr(setting)


def _prompts(space: Space) -> tuple[str, str]:
    return space.document_prompt, space.query_prompt


def _in_its_folder(store: Store, space: Space) -> _Described | None:
    """Return what is known of a space, or None if its folder is free; raises `ConfigError` if
    another space has it."""
    own = _described(store, space.name)
    if own is not None and own.space.spec_sha256 != space.spec_sha256:
        raise ConfigError(
            f"the folder {store.location(space.name)!r} has another space (spec "
            f"{own.space.spec_sha256[:12]}). Move it away or use another output."
        )
    return own


def _write(
    store: Store, space: Space, document: dict[str, Any], seen: CatalogRecord | None
) -> None:
    def require_as_claimed() -> None:  # a concurrent run may have begun the space
        for known in _all_described(store):
            if known.space.spec_sha256 == space.spec_sha256:
                known.space.require_tokenizer(space.tokenizer)
                known.space.require_probes(space.probes)
                if "catalog" in document and known.catalog != seen:
                    known.holding(catalog_from_json(document["catalog"]), store)

    write_document(store, f"{space.name}/{SPACE_FILE}", document, require_as_claimed)

"""Vector spaces share an output but never a folder, and are found by their settings without the
model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space, find_space, list_spaces, nearest_spaces
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore

SPEC = EncodingSpec(model="hash://16")
HUB = EncodingSpec(model="owner/model")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


@pytest.fixture
def space() -> Space:
    return SPEC.resolve()


def document(store: LocalStore, space: Space) -> dict:
    return json.loads((store.root / space.name / "space.json").read_bytes())


def resolved_from(spec: EncodingSpec, dimension: int) -> Space:
    """The space that a request resolves to while the model has this dimension."""
    return replace(EncodingSpec(model=f"hash://{dimension}").resolve(), requested=spec)


def found(store: LocalStore, spec: EncodingSpec) -> str | None:
    space = find_space(store, spec)
    return space.name if space else None


def without_folder(space: Space) -> Space:
    return replace(space, model_path="")


class TestClaiming:
    def test_new_space_gets_a_folder_with_a_space_json(
        self, store: LocalStore, space: Space
    ) -> None:
        assert claim_space(store, space) == space
        assert document(store, space) == space.to_json()
        assert [without_folder(space)] == list_spaces(store)

    def test_claiming_again_does_not_write(self, store: LocalStore, space: Space) -> None:
        for each in (space, resolved_from(HUB, 24), resolved_from(HUB, 16)):
            claim_space(store, each)
            before = (store.root / each.name / "space.json").stat().st_mtime_ns
            assert claim_space(store, each) == each
            assert (store.root / each.name / "space.json").stat().st_mtime_ns == before

    def test_space_that_a_concurrent_run_begins_meanwhile_is_the_same(
        self, store: LocalStore, space: Space, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def folders_before_it_begins() -> list[str]:
            monkeypatch.undo()
            listed = list(store.folders())
            claim_space(store, space)
            return listed

        monkeypatch.setattr(store, "folders", folders_before_it_begins)
        assert claim_space(store, space) == space
        assert [without_folder(space)] == list_spaces(store)

    def test_new_space_of_the_same_settings_says_why_in_one_line(
        self, store: LocalStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        old = resolved_from(HUB, 16)
        prompts = replace(SPEC, document_prompt="passage: ", query_prompt="query: ").resolve()
        claim_space(store, old)
        assert caplog.messages == []
        claim_space(store, replace(prompts, requested=HUB))
        claim_space(store, replace(prompts, requested=HUB))
        [line] = caplog.messages
        assert line == (
            f"owner/model begins the space {prompts.name} beside {old.name}: the model's prompts "
            "for documents and "
            "queries are 'passage: ' and 'query: ' and were '' and ''; set document_prompt and "
            "query_prompt to those "
            f"to stay with {old.name}"
        )
        claim_space(store, resolved_from(HUB, 24))
        assert caplog.messages[1].endswith("the model's content has changed")

    def test_setting_that_shapes_vectors_makes_another_space(
        self, store: LocalStore, space: Space
    ) -> None:
        other = replace(SPEC, document_prompt="query: ").resolve()
        claim_space(store, other)
        claim_space(store, space)
        assert sorted(store.folders()) == sorted([other.name, space.name])

    def test_same_weights_under_another_name_use_the_existing_folder(
        self, store: LocalStore, space: Space
    ) -> None:
        claim_space(store, space)
        renamed = replace(
            space,
            name=f"my-copy-{space.spec_sha256[:12]}",
            requested=replace(SPEC, model="hash://16", max_length=256),
        )
        assert claim_space(store, renamed).name == space.name
        assert store.folders() == [space.name]
        assert find_space(store, renamed.requested) == without_folder(space)
        assert find_space(store, SPEC) == without_folder(space), "the first name still finds it"

    def test_tokenizer_of_the_first_run_is_recorded_and_another_one_is_refused(
        self, store: LocalStore, space: Space
    ) -> None:
        first, updated, other = (
            replace(space, tokenizer=f"{digest} transformers-5.{minor} tokenizers-0.22")
            for digest, minor in (("ab", 1), ("ab", 2), ("cd", 2))
        )
        claim_space(store, space)  # by a run that loaded no tokenizer, or before it was recorded
        claim_space(store, first)
        claim_space(store, updated)
        claim_space(store, space)
        assert document(store, space)["tokenizer"] == first.tokenizer
        [known] = list_spaces(store)
        assert (known, known.tokenizer) == (space, first.tokenizer)
        with pytest.raises(
            ConfigError,
            match=r"gives texts other tokens .* expected ab transformers-5\.1 .* not cd",
        ):
            claim_space(store, other)
        assert document(store, space)["tokenizer"] == first.tokenizer

    def test_output_that_is_the_folder_of_a_space_is_refused(
        self, store: LocalStore, space: Space
    ) -> None:
        claim_space(store, space)
        inner = open_store(store.root / space.name)
        with pytest.raises(
            ConfigError, match="is the folder of one space; give the folder above it"
        ):
            claim_space(inner, space)
        assert inner.folders() == []

    @pytest.mark.parametrize("change", [shutil.move, shutil.copytree])
    def test_renamed_or_copied_folder_is_refused(
        self, store: LocalStore, space: Space, change: Any
    ) -> None:
        claim_space(store, space)
        change(store.root / space.name, store.root / "backup")
        with pytest.raises(
            ConfigError, match=r"backup/space.json.*the folder was renamed or the file copied"
        ):
            claim_space(store, space)

    @pytest.mark.parametrize(
        "change",
        [
            {"dimension": 17},
            {"spec_sha256": "0" * 64},
            {"format": 99},
            {"name": None},
            {"turn": "1"},
        ],
    )
    def test_changed_space_json_is_refused(
        self, store: LocalStore, space: Space, change: dict
    ) -> None:
        claim_space(store, space)
        path = store.root / space.name / "space.json"
        path.write_text(json.dumps(document(store, space) | change))
        with pytest.raises(ConfigError, match=r"space\.json' (cannot be used|describes)"):
            claim_space(store, space)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
    def test_damaged_space_json_is_refused(
        self, store: LocalStore, space: Space, content: bytes
    ) -> None:
        claim_space(store, space)
        (store.root / space.name / "space.json").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be used"):
            list_spaces(store)


class TestFinding:
    def test_space_is_found_by_its_settings(self, store: LocalStore, space: Space) -> None:
        assert find_space(store, SPEC) is None and list_spaces(store) == []
        claim_space(store, space)
        assert find_space(store, SPEC) == without_folder(space)
        assert find_space(store, replace(SPEC, document_prompt="x")) is None

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]])
    def test_last_claimed_of_two_spaces_with_the_same_settings_is_found(
        self, store: LocalStore, order: list[int]
    ) -> None:
        both = sorted(
            (resolved_from(HUB, 16), resolved_from(HUB, 24)), key=lambda space: space.name
        )
        old, new = (both[place] for place in order)
        claim_space(store, old)
        assert "turn" not in document(store, old), "most outputs never need it"
        for meant in (new, new, old, old, new):  # the content changes, stays, and changes back
            claim_space(store, meant)
            assert found(store, HUB) == meant.name

    def test_claim_does_not_change_a_request_that_its_space_does_not_answer(
        self, store: LocalStore
    ) -> None:
        copy = EncodingSpec(model="/somewhere/my-copy")
        old, new = resolved_from(HUB, 16), resolved_from(HUB, 24)
        claim_space(store, old)
        claim_space(store, replace(old, requested=copy))
        claim_space(store, new)
        assert (found(store, HUB), found(store, copy)) == (new.name, old.name)
        claim_space(store, replace(new, requested=copy))
        assert (found(store, HUB), found(store, copy)) == (new.name, new.name)

    def test_space_is_found_without_the_model(self, store: LocalStore, space: Space) -> None:
        missing = EncodingSpec(model="owner/model-that-is-nowhere")
        claim_space(store, replace(space, requested=missing))
        assert found(store, missing) == space.name


@pytest.mark.parametrize("model", ["/models/gone", "./gone", "~/gone"])
def test_missing_folder_of_a_model_is_no_other_model(tmp_path: Path, model: str) -> None:
    store = open_store(tmp_path)
    claim_space(store, EncodingSpec("hash://8").resolve())

    with pytest.raises(ConfigError, match=r"the model's folder '.*gone' is not there"):
        find_space(store, EncodingSpec(model))


def test_spaces_are_shown_with_the_settings_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    wanted, near = EncodingSpec("model"), EncodingSpec("hash://8").resolve()
    near = replace(near, requested=wanted, model_folder=str(tmp_path / "model"))
    far = replace(near, name="far", requested=replace(wanted, dtype="float16"))
    first, second = nearest_spaces(wanted, [near, far]).split("; ")
    assert first == f"{near.name} (the content of the model was another one)"
    assert second == "far (dtype is 'float32' and was 'float16')"

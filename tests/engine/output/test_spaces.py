"""Vector spaces share an output and never a folder; who asks for one finds it without a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space, find_space, list_spaces
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore

SPEC = EncodingSpec(model="hash://16")
HUB = EncodingSpec(model="somebody/model")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


@pytest.fixture
def space() -> Space:
    return SPEC.resolve()


def document(store: LocalStore, space: Space) -> dict:
    return json.loads((store.root / space.name / "space.json").read_bytes())


def asked_for(spec: EncodingSpec, dimension: int) -> Space:
    """A space that a request was resolved to: what the model is at the time decides its dimension here."""
    return replace(EncodingSpec(model=f"hash://{dimension}").resolve(), requested=spec)


def found(store: LocalStore, spec: EncodingSpec) -> str | None:
    space = find_space(store, spec)
    return space.name if space else None


def without_folder(space: Space) -> Space:
    return replace(space, model_path="")


class TestClaiming:
    def test_a_new_space_gets_a_folder_and_a_description(self, store: LocalStore, space: Space) -> None:
        assert claim_space(store, space) == space
        assert document(store, space) == space.to_json()
        assert [without_folder(space)] == list_spaces(store)

    def test_claiming_again_changes_nothing(self, store: LocalStore, space: Space) -> None:
        claim_space(store, space)
        before = (store.root / space.name / "space.json").stat().st_mtime_ns
        assert claim_space(store, space) == space
        assert (store.root / space.name / "space.json").stat().st_mtime_ns == before

    def test_two_spaces_stand_side_by_side(self, store: LocalStore, space: Space) -> None:
        other = EncodingSpec(model="hash://32").resolve()
        claim_space(store, space)
        claim_space(store, other)
        assert {found.name for found in list_spaces(store)} == {space.name, other.name}

    @pytest.mark.parametrize("spec", [replace(SPEC, prompt="query: "), replace(SPEC, dtype="float16")])
    def test_whatever_shapes_a_vector_makes_another_space(
        self, store: LocalStore, space: Space, spec: EncodingSpec
    ) -> None:
        assert claim_space(store, spec.resolve()).name != claim_space(store, space).name

    def test_the_same_weights_under_another_name_go_to_the_folder_that_is_there(
        self, store: LocalStore, space: Space
    ) -> None:
        claim_space(store, space)
        renamed = replace(
            space, name=f"my-copy-{space.spec_sha256[:12]}", requested=replace(SPEC, model="hash://16", max_length=256)
        )
        assert claim_space(store, renamed).name == space.name
        assert store.folders() == [space.name]
        assert find_space(store, renamed.requested) == without_folder(space)
        assert find_space(store, SPEC) == without_folder(space), "the first name still finds it"

    def test_an_output_that_is_itself_a_spaces_folder_is_refused(self, store: LocalStore, space: Space) -> None:
        claim_space(store, space)
        inner = open_store(store.root / space.name)
        with pytest.raises(ConfigError, match="is the folder of one space; give the folder above it"):
            claim_space(inner, space)
        assert inner.folders() == []

    def test_a_folder_that_describes_another_space_is_refused(self, store: LocalStore, space: Space) -> None:
        other = EncodingSpec(model="hash://32").resolve()
        claim_space(store, other)
        (store.root / other.name).rename(store.root / space.name)
        with pytest.raises(ConfigError, match=r"the folder was renamed or the file copied"):
            claim_space(store, space)

    def test_a_copied_folder_is_refused(self, store: LocalStore, space: Space) -> None:
        claim_space(store, space)
        shutil.copytree(store.root / space.name, store.root / "backup")
        with pytest.raises(ConfigError, match="backup"):
            claim_space(store, space)

    @pytest.mark.parametrize(
        "change", [{"dimension": 17}, {"spec_sha256": "0" * 64}, {"format": 99}, {"name": None}, {"turns": ["1"]}]
    )
    def test_a_description_that_was_changed_is_refused(self, store: LocalStore, space: Space, change: dict) -> None:
        claim_space(store, space)
        path = store.root / space.name / "space.json"
        path.write_text(json.dumps(document(store, space) | change))
        with pytest.raises(ConfigError, match=r"space\.json' (cannot be used|describes)"):
            claim_space(store, space)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
    def test_a_description_that_cannot_be_read_is_refused(
        self, store: LocalStore, space: Space, content: bytes
    ) -> None:
        claim_space(store, space)
        (store.root / space.name / "space.json").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be used"):
            list_spaces(store)

    def test_folders_of_other_things_are_passed_over(self, store: LocalStore, space: Space) -> None:
        (store.root / "notes").mkdir(parents=True)
        claim_space(store, space)
        assert [found.name for found in list_spaces(store)] == [space.name]


class TestFinding:
    def test_a_space_is_found_by_what_was_asked_for(self, store: LocalStore, space: Space) -> None:
        claim_space(store, space)
        assert find_space(store, SPEC) == without_folder(space)
        assert find_space(store, replace(SPEC, prompt="x")) is None

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]])
    def test_of_two_that_were_asked_for_alike_the_one_claimed_last_is_meant(
        self, store: LocalStore, order: list[int]
    ) -> None:
        both = sorted((asked_for(HUB, 16), asked_for(HUB, 24)), key=lambda space: space.name)
        old, new = (both[place] for place in order)
        claim_space(store, old)
        assert "turns" not in document(store, old), "most outputs never need them"
        for meant in (new, new, old, old, new):  # contents that come, go on, and come back
            claim_space(store, meant)
            assert found(store, HUB) == meant.name

    def test_claiming_the_one_that_is_meant_again_changes_nothing(self, store: LocalStore) -> None:
        old, new = asked_for(HUB, 16), asked_for(HUB, 24)
        claim_space(store, old)
        claim_space(store, new)
        before = [document(store, space) for space in (old, new)]
        claim_space(store, new)
        assert [document(store, space) for space in (old, new)] == before

    def test_what_one_request_means_is_nothing_to_another(self, store: LocalStore) -> None:
        copy = EncodingSpec(model="/somewhere/my-copy")
        old, new = asked_for(HUB, 16), asked_for(HUB, 24)
        claim_space(store, old)
        claim_space(store, replace(old, requested=copy))
        claim_space(store, new)
        assert (found(store, HUB), found(store, copy)) == (new.name, old.name)
        claim_space(store, replace(new, requested=copy))
        assert (found(store, HUB), found(store, copy)) == (new.name, new.name)
        claim_space(store, replace(old, requested=copy))
        assert (found(store, HUB), found(store, copy)) == (new.name, old.name)

    def test_an_output_without_numbers_means_the_first_by_name_until_one_is_claimed(self, store: LocalStore) -> None:
        both = [asked_for(HUB, 16), asked_for(HUB, 24)]
        for space in both:
            claim_space(store, space)
            path = store.root / space.name / "space.json"
            path.write_text(json.dumps(document(store, space) | {"turns": []}))
        assert found(store, HUB) == min(space.name for space in both)
        claim_space(store, max(both, key=lambda space: space.name))
        assert found(store, HUB) == max(space.name for space in both)

    def test_it_is_found_without_the_model(self, store: LocalStore, space: Space) -> None:
        gone = EncodingSpec(model="somebody/model-that-is-nowhere")
        claim_space(store, replace(space, requested=gone))
        found = find_space(store, gone)
        assert found is not None
        assert found.name == space.name

    def test_an_output_that_is_not_there_has_none(self, store: LocalStore) -> None:
        assert find_space(store, SPEC) is None
        assert list_spaces(store) == []

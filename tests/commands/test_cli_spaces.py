"""The command line finds the space, its model and its columns in the output, and refuses another
catalog."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from surge_dagster.engine.output.current_space import write_current
from tests.command import EMBED, MODEL, Command
from tests.engine.encoder.conftest import tiny_model
from tests.engine.model.small_model import model_folder
from tests.spaces import Spaces


def test_search_and_verify_use_the_only_space_with_the_prompt_and_columns_of_its_last_run(
    surge: Command,
) -> None:
    texts = ["red", "green", "blue"]
    surge.write("a", 3, sku=["x", "y", "z"], title=texts)
    columns = ("--id", "sku", "--text", "title")
    surge.embed("--document-prompt", "a ", "--query-prompt", "a ", *columns)
    verified = surge.json("verify", "catalog", "out", "--reencode", "all")
    assert verified["texts"] == 3
    assert verified["violations"] == []
    [hit] = surge.json("search", "green", "out", "-k", 1)["hits"]
    assert hit["id"] == "y"
    assert hit["score"] == pytest.approx(1, abs=1e-5), "with the prompts of the space"
    switched = surge.json("switch", "catalog", "out", "--space", verified["space"])
    assert switched["current"]["space"] == verified["space"]
    error = surge.error("verify", "catalog", "out", "--text", "text", "--reencode", 0, expected=1)
    assert "text" in error, "a setting that somebody gives counts"


@pytest.fixture(params=["hashed", pytest.param("loaded", marks=pytest.mark.soak)])
def tiny(request: pytest.FixtureRequest, surge: Command) -> Path:
    """The folder `models/tiny` of a model. Workers hash the prompt and the text; those of `make
    soak` load the model, which takes seconds for each pool.
    """
    folder = surge.root / "models" / "tiny"
    if request.param == "loaded":
        folder.parent.mkdir()
        return tiny_model("bert_cls", surge.root / "made").rename(folder)
    request.getfixturevalue("hashing_workers")
    return model_folder(folder)


def test_model_in_a_relative_folder_is_found_from_any_working_folder(
    surge: Command, tiny: Path
) -> None:
    surge.write("a", 3)
    name = surge.json("embed", "catalog", "out", "--model", "models/tiny")["space"]
    assert name.startswith("tiny-")
    record = json.loads(surge.space_json().read_text())
    assert (record["requested"]["model"], record["model_folder"]) == ("tiny", str(tiny))
    surge.folder = surge.root / "elsewhere"
    surge.folder.mkdir()
    found = surge.json("search", "a number 2", "../out", "-k", 1, "--yes")
    assert (found["space"], found["hits"][0]["id"]) == (name, "a-2")
    assert surge.json("verify", "../catalog", "../out", "--yes")["violations"] == []
    error = surge.error("verify", "../catalog", "../out")
    assert "--yes" in error, "a model that only the output names is not loaded"
    (surge.root / "models").rename(surge.root / "moved")
    error = surge.error("search", "a number 2", "../out", "--yes")
    assert "models/tiny" in error and "check the path" in error
    found = surge.json(
        "search",
        "a number 2",
        "../out",
        "--model",
        (surge.root / "moved" / "tiny").rename("renamed"),
    )
    assert (found["space"], found["hits"][0]["id"]) == (name, "a-2")


def test_space_is_searched_and_verified_with_its_own_prompts_after_those_of_its_model_changed(
    surge: Command, tiny: Path
) -> None:
    surge.write("a", 3)
    name = surge.json("embed", "catalog", "out", "--model", tiny)["space"]
    settings = tiny / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": None}
    before = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(before | prompts))  # it resolves to others from now on
    for given in (("--model", tiny), ("--yes",)):
        assert surge.json("search", "a number 2", "out", *given)["hits"][0][
            "score"
        ] == pytest.approx(1, abs=1e-5)
        assert surge.json("verify", "catalog", "out", *given)["violations"] == []
    assert surge.json("embed", "catalog", "out", "--model", tiny)["space"] != name, (
        "begun, and not current"
    )
    found = surge.json("search", "a number 2", "out", "--yes")
    assert (found["space"], found["hits"][0]["score"]) == (name, pytest.approx(1, abs=1e-5))
    weights = next(tiny.rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert f"not into {name}: the model's content has changed." in surge.error(
        "search", "a number 2", "out", "--yes"
    )


def test_folder_that_only_the_output_names_is_not_loaded_for_a_model_of_the_settings(
    surge: Command, three_spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_spaces.copy_to(surge.root, ("hash://16",))
    described = surge.space_json("output")
    record = json.loads(described.read_text())
    record["requested"]["model"] = "owner/model"
    described.write_text(json.dumps(record | {"model_folder": "/somewhere"}))
    write_current(made.store, record["name"], seen=None)
    # The same model, in a request that the output does not know.
    monkeypatch.setenv("SURGE_MODEL", "owner/model")
    monkeypatch.setenv("SURGE_MAX_LENGTH", "9")
    error = surge.error("search", "b/7", "output")
    assert "names the model '/somewhere', which the settings do not" in error
    assert "--yes" in error


def test_several_spaces_need_a_name_or_a_current_one(surge: Command, three_spaces: Spaces) -> None:
    made = three_spaces.copy_to(surge.root)
    for command in (("search", "b/7", "output"), ("verify", "catalog", "output")):
        assert "holds several spaces" in surge.error(*command)
    _, second, _ = made.names()
    write_current(made.store, second, seen=None)
    assert surge.json("search", "b/7", "output")["space"] == second
    assert surge.json("verify", "catalog", "output")["space"] == second


def test_search_uses_the_only_space_if_the_settings_mean_another_of_its_model(
    surge: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surge.write("a", 3)
    name = surge.json("embed", "catalog", "out", "--model", tiny, "--max-length", 9)["space"]
    monkeypatch.setenv("SURGE_MODEL", str(tiny))

    found = surge.json("search", "a number 2", "out", "-k", 1)

    assert found["space"] == name
    assert f"searching the current space {name}" in surge.printed


def test_space_that_the_output_lacks_is_refused_with_the_settings_of_its_spaces(
    surge: Command, tiny: Path
) -> None:
    surge.write("a", 3)
    name = surge.json("embed", "catalog", "out", "--model", tiny, "--max-length", 9)["space"]

    error = surge.error("search", "a number 2", "out", "--model", tiny)

    assert f"it holds {name} (max_length is unset and was 9)" in error


def test_output_without_spaces_is_refused_with_what_to_do(surge: Command) -> None:
    error = surge.error("search", "a number 2", "out", *MODEL)

    assert "out' holds no embeddings. Run `surge-dagster embed` first" in error


def test_search_takes_the_output_from_the_settings_as_other_commands_do(surge: Command) -> None:
    surge.write("a", 3)
    (surge.root / "surge.yaml").write_text("source: catalog\noutput: out\nmodel: hash://16\n")
    surge.json("embed")
    assert surge.json("search", "a number 2", "-k", 1)["hits"][0]["id"] == "a-2"
    (surge.root / "surge.yaml").unlink()
    assert surge.json("search", "a number 2", "out", "-k", 1)["hits"][0]["id"] == "a-2"
    assert "unexpected extra argument(s) (number)" in surge.error("search", "a", "out", "number")
    assert "TEXT" in surge.error("search", "--model", "hash://16")


class TestAnotherCatalog:
    @pytest.fixture(autouse=True)
    def made(self, surge: Command) -> None:
        surge.write("a", 3)
        surge.embed()

    def test_another_catalog_is_refused_with_both_names_and_needs_a_space_of_its_own(
        self, surge: Command
    ) -> None:
        surge.write("a", 5, catalog="other")
        files = sorted(surge.space_json().parent.iterdir())
        before = list(map(Path.read_bytes, files))
        error = surge.error("embed", "other", "out", *MODEL)
        assert f"{surge.root}/catalog'" in error and f"{surge.root}/other'" in error
        assert sorted(surge.space_json().parent.iterdir()) == files
        assert list(map(Path.read_bytes, files)) == before
        assert surge("embed", "other", "out", "--model", "hash://24")[0] == 0, "a space of its own"
        shutil.copytree(surge.root / "catalog", surge.root / "copy")  # everything in it is fresh
        surge.error("embed", "copy", "out", *MODEL)

    def test_table_in_other_partitions_is_refused_before_anything_is_written(
        self, surge: Command
    ) -> None:
        lines = ("id,text,color,size", "1,a,red,large", "2,b,red,small", "3,c,blue,small")
        (surge.root / "t.csv").write_text("\n".join(lines))
        surge.json("embed", "t.csv", "table", *MODEL, "--partition-by", "color")

        error = surge.error("embed", "t.csv", "table", *MODEL, "--partition-by", "size")

        assert "with partition_by ['color'], and this run has ['size']" in error
        files = surge.space_json("table").parent.glob("*.parquet")
        assert {file.stem for file in files} == {"red", "blue"}

    def test_catalog_that_moved_with_its_output_or_is_reached_another_way_is_the_same(
        self, surge: Command
    ) -> None:
        (surge.root / "link").symlink_to("catalog")
        surge.json("embed", "link", "out", *MODEL)
        surge.json("embed", f"file://{surge.root}/catalog", "out", *MODEL)
        (surge.root / "moved").mkdir()
        for name in ("catalog", "out"):
            (surge.root / name).rename(surge.root / "moved" / name)
        surge.json("embed", "moved/catalog", "moved/out", *MODEL)

    def test_catalog_that_moved_is_the_same_once_its_former_place_was_given_as_its_name(
        self, surge: Command
    ) -> None:
        (surge.root / "catalog").rename(surge.root / "new")
        surge.write("b", 2, catalog="new")
        moved = ("embed", "new", "out", *MODEL)
        surge.error(*moved)
        surge.json(*moved, "--catalog-name", surge.root / "catalog")
        surge.json(*moved)  # said once
        surge.write("c", 2)
        surge.error(*EMBED)

    def test_verification_of_another_catalog_names_both(self, surge: Command) -> None:
        surge.write("a", 5, catalog="other")
        error = surge.error("verify", "other", "out", "--reencode", 0, expected=1)
        assert (
            f"holds the catalog '{surge.root}/catalog', and '{surge.root}/other' is read" in error
        )

    def test_damaged_settings_of_a_catalog_are_refused_in_one_line(self, surge: Command) -> None:
        record = json.loads(surge.space_json().read_text())
        record["catalog"]["settings"] = {"max_text_bytes": "many", "id": 3}
        surge.space_json().write_text(json.dumps(record))
        error = surge.error("verify", "catalog", "out", "--reencode", 0)
        assert "cannot be used: id: " in error
        assert "pydantic" not in error
        assert surge.printed.count("\n") == 1


def test_verify_fails_where_partitions_have_no_file(surge: Command) -> None:
    for key in "abc":
        surge.write(key, 3)
    surge.write("d", 3, text=["x", None, "y"])
    surge.error(*EMBED, expected=1)
    (surge.space_json().parent / "a.parquet").unlink()
    code, out, _ = surge("verify", "catalog", "out")
    assert code == 1 and "4 partitions, 2 without a file" in out and "2 violations" in out
    code, out, error = surge("verify", "catalog", "out", "--partial")
    assert code == 0 and "compared (seed " in out and "no violation, 2 warnings" in out
    assert "'a'" in error and "'d'" in error
    surge.write("b", 4)
    assert surge("verify", "catalog", "out", "--partial")[0] == 1, "a stale file is no missing one"


def test_verification_that_read_no_file_fails(surge: Command) -> None:
    surge.write("a", 3)
    surge.embed()
    (surge.space_json().parent / "a.parquet").unlink()

    assert "nothing was verified, because no partition has a file" in surge.error(
        "verify", "catalog", "out", "--partial", expected=1
    )


def test_code_of_a_model_that_only_the_output_names_is_not_run(surge: Command) -> None:
    surge.write("a", 3)
    surge.embed()
    record = json.loads(surge.space_json().read_text())
    commit = "5" * 40
    record["requested"] |= {"model": "team/model", "trust_remote_code": commit}
    surge.space_json().write_text(json.dumps(record))
    for command in (("search", "x", "out", "--yes"), ("verify", "catalog", "out", "--yes")):
        error = surge.error(*command)
        assert f"load it with --trust-remote-code {commit} and --model team/model" in error

"""The JSON of events that are alike is what Dagster makes of each of them."""

from __future__ import annotations

import json
import logging

import dagster as dg
from dagster._core.events import AssetObservationData, DagsterEvent, StepMaterializationData
from dagster._core.events.log import EventLogEntry
from dagster._serdes import serialize_value
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.orchestration.event_texts import EventTexts
from surge_dagster.orchestration.partition_events import AnyEvent, FilePath, PartitionEvent
from surge_dagster.orchestration.partition_events import made as dagsters

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["7316400070000000", '"', "\\", "%s %d"]
)
EVENTS = st.builds(
    PartitionEvent,
    st.sampled_from([dg.AssetMaterialization, dg.AssetObservation]),
    st.sampled_from([dg.AssetKey("asset"), dg.AssetKey(["an", "asset %s"])]),
    TEXT,
    st.dictionaries(
        st.sampled_from(["a", "b", "c", 'd"', "%"]),
        TEXT | TEXT.map(FilePath) | st.integers() | st.booleans() | st.floats(allow_nan=True),
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(["dagster/data_version", "dagster/code_version"]), TEXT),
)


def serialize(given: AnyEvent, timestamp: float) -> str:
    """As Dagster stores it."""
    event = dagsters(given)
    made = isinstance(event, dg.AssetMaterialization)
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION if made else dg.DagsterEventType.ASSET_OBSERVATION
    data = StepMaterializationData(event) if made else AssetObservationData(event)
    told = DagsterEvent(kind.value, "job", event_specific_data=data, step_key="step", message=event.label)
    return serialize_value(EventLogEntry(None, logging.DEBUG, "", "run", timestamp, "step", "job", told))


@given(st.lists(EVENTS, min_size=1, max_size=8), st.floats(0, 2e9))
@settings(max_examples=150, deadline=None)
def test_a_text_is_the_one_that_dagster_makes(events: list[PartitionEvent], timestamp: float) -> None:
    texts = EventTexts(serialize)
    for event in events:
        assert texts.text(event, timestamp) == serialize(event, timestamp)


def test_dagster_is_asked_once_for_events_of_a_shape() -> None:
    asked: list[AnyEvent] = []

    def counting(event: AnyEvent, timestamp: float) -> str:
        asked.append(event)
        return serialize(event, timestamp)

    texts = EventTexts(counting)
    for number in range(100):
        metadata = {"rows": number, "key": f"k{number}", "counted": True}
        event = PartitionEvent(dg.AssetObservation, dg.AssetKey("asset"), f"p{number}", metadata, {})
        assert json.loads(texts.text(event, number / 3))["timestamp"] == number / 3
    assert len(asked) == 1


def test_an_event_that_is_dagsters_own_or_holds_another_value_is_left_to_dagster() -> None:
    texts = EventTexts(serialize)
    own = dg.AssetMaterialization("asset", description="described", metadata={"nested": {"a": [1, None]}})
    other = PartitionEvent(dg.AssetObservation, dg.AssetKey("asset"), "p", {"nested": [1]}, {})  # pyright: ignore[reportArgumentType]
    for event in (own, other, other):
        assert texts.text(event, 0.5) == serialize(event, 0.5)

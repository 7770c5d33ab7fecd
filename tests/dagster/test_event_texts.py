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

from surge_dagster.assets.event_texts import Event, EventTexts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(["7316400070000000", '"', "\\"])
PLAIN = TEXT.map(dg.MetadataValue.text) | TEXT.map(dg.MetadataValue.path) | st.integers().map(dg.MetadataValue.int)
OTHER = st.booleans().map(dg.MetadataValue.bool) | st.dictionaries(TEXT, st.integers()).map(dg.MetadataValue.json)
FLOAT = st.floats(allow_nan=True).map(dg.MetadataValue.float)
EVENTS = st.builds(
    lambda kind, partition, metadata, versions, description: kind(
        "asset", partition=partition, metadata=metadata, tags=versions, description=description
    ),
    st.sampled_from([dg.AssetMaterialization, dg.AssetObservation]),
    st.none() | TEXT,
    st.dictionaries(st.sampled_from(["a", "b", "c", 'd"']), PLAIN | FLOAT | OTHER, max_size=4),
    st.dictionaries(st.sampled_from(["dagster/data_version", "dagster/code_version"]), TEXT),
    st.none() | st.just("described"),
)


def serialize(event: Event, timestamp: float) -> str:
    """As Dagster stores it."""
    made = isinstance(event, dg.AssetMaterialization)
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION if made else dg.DagsterEventType.ASSET_OBSERVATION
    data = StepMaterializationData(event) if made else AssetObservationData(event)
    told = DagsterEvent(kind.value, "job", event_specific_data=data, step_key="step", message=event.label)
    return serialize_value(EventLogEntry(None, logging.DEBUG, "", "run", timestamp, "step", "job", told))


@given(st.lists(EVENTS, min_size=1, max_size=8), st.floats(0, 2e9))
@settings(max_examples=150, deadline=None)
def test_a_text_is_the_one_that_dagster_makes(events: list[Event], timestamp: float) -> None:
    texts = EventTexts(serialize)
    for event in events:
        assert texts.text(event, timestamp) == serialize(event, timestamp)


def test_dagster_is_asked_once_for_events_of_a_shape() -> None:
    asked: list[Event] = []

    def counting(event: Event, timestamp: float) -> str:
        asked.append(event)
        return serialize(event, timestamp)

    texts = EventTexts(counting)
    for number in range(100):
        event = dg.AssetObservation("asset", partition=f"p{number}", metadata={"rows": number, "key": f"k{number}"})
        assert json.loads(texts.text(event, number / 3))["timestamp"] == number / 3
    assert len(asked) == 1

"""Which model of an output may be loaded, and the pool that encodes queries for one of its spaces.

A model that only the output names is not loaded unasked: somebody else may have written it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surge_dagster.config.settings import EncoderSettings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import HASH_SCHEME, EncodingSpec, Space
from surge_dagster.engine.output.spaces import find_space, require_model
from surge_dagster.engine.store.store import Store


@contextmanager
def query_pool(
    settings: EncoderSettings, store: Store, space: Space, *, yes: bool
) -> Iterator[EncoderPool]:
    """Give a pool that encodes queries for a space of the output; errors are those of
    `spec_to_load`."""
    spec = spec_to_load(settings, store, space, yes=yes)
    with settings.pool_of_run(spec, "query") as pool:
        require_model(pool.space, space)
        yield pool


def spec_to_load(
    settings: EncoderSettings, store: Store, space: Space, *, yes: bool
) -> EncodingSpec:
    """Return what loads the model of a space.

    Args:
        yes: also load a model that only the output names.

    Raises:
        ConfigError: only the output names the model, or code of it.
    """
    spec = settings.encoding_spec()
    asked = find_space(store, spec)
    if asked is not None and asked.spec_sha256 == space.encoder_sha256:
        return space.loadable_from(spec)

    loadable = space.loadable
    model = loadable.model
    trusted = loadable.trust_remote_code
    if trusted is not None and trusted != settings.trust_remote_code:
        raise ConfigError(
            f"the output {store.url!r} names code of the model {model!r}. If you trust that code, "
            f"load it with --trust-remote-code {trusted} and --model {model}."
        )
    if not yes and not model.startswith(HASH_SCHEME) and model != settings.model:
        raise ConfigError(
            f"the output {store.url!r} names the model {model!r}, which the settings do not. If "
            "you trust the output, load it with --yes, or `load_models: true` in a job's config."
        )
    return settings.reaching(loadable)

"""The sources of `[data]`: one, or several that are mixed (`[data.sources.NAME]`)."""

from dataclasses import fields, replace

from titanlite.config.schema import DataSection, SourceSection


def get_sources(data: DataSection) -> dict[str, DataSection]:
    """What to read, as one `[data]` section for each source, by name: `data` itself, as "", where it has no sources.

    What a source does not set is as in `data`.
    """
    if not data.sources:
        return {"": data}
    return {name: replace(data, sources={}, **_get_given(source)) for name, source in sorted(data.sources.items())}


def get_source_key(data: DataSection, source: str, name: str) -> str:
    """The key of setting `name` of a source: where it is set, which may be `[data]`."""
    own = source and name in _get_given(data.sources[source])
    return f"data.sources.{source}.{name}" if own else f"data.{name}"


def _get_given(source: SourceSection) -> dict[str, object]:
    given = {field.name: getattr(source, field.name) for field in fields(source) if field.name != "weight"}
    return {name: value for name, value in given.items() if value is not None}

"""Model families: preset sizes, and the maps from a family's Hugging Face config.json and
checkpoint keys to titanlite's.

Every `Family` in a file of this folder is found; a single file adds a model that the decoder can
express. Only reading a config.json imports torch, through transformers' classes.
"""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.extension import is_extension, load_extension
from titanlite.base.files import read_json
from titanlite.base.hf_objects import is_known
from titanlite.base.text import list_names, suggest
from titanlite.config.assets import suggest_path
from titanlite.config.model import (
    OPTIONAL_ROPE_FIELDS,
    ROPE_FIELDS,
    AnyModelConfig,
    ModelConfig,
    ModelSection,
    RopeScaling,
    TransformersConfig,
)
from titanlite.config.parallelism import PartSizes
from titanlite.models.families.config_json import NotNativeError, transformers_config
from titanlite.models.families.family import Family, check_model_config
from titanlite.models.families.parts import Layer

_ASKED_FOR = "model.implementation asks for it"
_WITHOUT_EFFECT_ON_WEIGHTS = {"initializer_range", "max_position_embeddings", "pad_token_id"}


@cache
def families() -> Mapping[str, Family]:
    """Return all families in the files of this folder by name, the `model_type` of their Hugging
    Face configuration.
    """
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    found = [
        value for module in modules for value in vars(module).values() if isinstance(value, Family)
    ]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def use_family(name: str) -> str:
    """Return the name of the family that `model.name` names. A family in an extension is checked
    and added to `families()`.
    """
    if not is_extension(name):
        return name
    family = load_extension("model.name", name)
    if not isinstance(family, Family):
        raise ConfigError(
            f'model.name = "{name}": it is of type {type(family).__name__}. Name a Family.'
        )
    if families().get(family.name, family) is not family:
        raise ConfigError(
            f'model.name = "{name}": there is a family "{family.name}" already. Rename yours, or '
            "leave the name out."
        )
    cast(dict[str, Family], families())[family.name] = family
    return family.name


def find_family(model_type: Any) -> Family | None:
    """Return the family that reads a config.json with this `model_type`; None if there is none."""
    found = (each for each in families().values() if model_type in each.model_types)
    return next(found, None)


def family_of(config: ModelConfig) -> Family:
    """Return the family that `config` belongs to."""
    return families()[config.family]


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Return the composition of each layer of the native decoder."""
    layer = family_of(config).layer
    return tuple(layer(config, index) for index in range(config.num_layers))


def part_sizes(config: AnyModelConfig) -> list[PartSizes]:
    """Return the sizes of each kind of part in the native decoder's layers; empty for other
    models.
    """
    if not isinstance(config, ModelConfig):
        return []
    parts = dict.fromkeys(block.part for layer in layers_of(config) for block in layer)
    return [part.sizes(config) for part in parts]


def resolve_model_config(
    section: ModelSection, where: str = "model.hf_assets_path"
) -> AnyModelConfig:
    """Resolve the sizes of the model in `[model]`: a flavor or a config.json (`where` is the
    setting that names it), then the overrides.

    With `model.implementation` = "auto" it is the native decoder if that can express the model,
    else transformers' class.

    Raises ConfigError: unknown family or flavor, unreadable config.json, an architecture that
    neither implementation supports, or sizes that contradict each other.
    """
    use_family(section.name)
    overrides = _given_overrides(section)
    if section.flavor:
        config = _apply_overrides(_preset(section), overrides)
        if section.implementation != "transformers":
            return config
        hf = {**family_of(config).to_hf(config), "model_type": config.family}
        return transformers_config(hf, f"model.flavor {section.flavor}", _ASKED_FOR)
    folder = Path(section.hf_assets_path)
    where = "model.path" if section.path else where
    found = any_model_config_from_hf(folder, where, section.implementation)
    if isinstance(found, ModelConfig):
        return _apply_overrides(found, overrides)
    if overrides:
        raise ConfigError(
            f"model.overrides: {list_names(overrides)} cannot be changed here, since the model is "
            f"transformers' class ({found.why}). Change its config.json."
        )
    return found


def get_model_type(section: ModelSection) -> str:
    """Return Hugging Face's name of the family of the model in `[model]`."""
    folder = Path(section.hf_assets_path)
    if not section.flavor and section.hf_assets_path and _config_file(folder).is_file():
        return str(_read_config(folder)["model_type"])
    return _preset(section).family if section.flavor else section.name


def find_other_model(
    section: ModelSection, config: AnyModelConfig, weights: str, where: str
) -> list[str]:
    """Return a problem if `config`, of a flavor, is a different model than the one in the folder
    `weights`, if that is set.

    `where` is the setting that names the folder. Weights of equal shapes load, but compute a
    different function with a different rope_theta or epsilon. Settings in [model.overrides] are
    intended.
    """
    folder = Path(weights)
    flavor = section.flavor
    if not weights or not flavor or not isinstance(config, ModelConfig):
        return []
    if not (folder / "config.json").is_file():
        return []
    remedy = "Leave model.name and model.flavor out: then its config.json counts."
    try:
        theirs = model_config_from_hf(folder, where)
    except NotNativeError as error:
        return [f"model.flavor = '{flavor}' is not the model of {where}: {error} {remedy}"]
    text = describe_differences(config, theirs, _given_overrides(section))
    return (
        [f"model.flavor = '{flavor}' is not the model in {folder}: {text}. {remedy}"]
        if text
        else []
    )


def describe_differences(
    ours: ModelConfig, theirs: ModelConfig, meant: Collection[str] = ()
) -> str:
    """Describe the fields that differ in `theirs` and change the function that given weights
    compute, except the fields in `meant`; "" if there are none.
    """
    there = asdict(theirs)
    left_out = {*meant, *_WITHOUT_EFFECT_ON_WEIGHTS}
    differences = [
        f"{key} is {value!r}, there {there[key]!r}"
        for key, value in asdict(ours).items()
        if key not in left_out and there[key] != value
    ]
    return list_names(differences, "; ")


def _preset(section: ModelSection) -> ModelConfig:
    name = use_family(section.name)
    flavor = section.flavor
    family = families().get(name)
    if family is None:
        raise ConfigError(f"model.name: unknown family '{name}'{_nearest(name, families())}")
    # torchtitan's qwen3 includes the sizes of qwen3_moe
    relatives = [each for key, each in families().items() if key.startswith(f"{name}_")]
    for each in (family, *relatives):
        if flavor in each.presets:
            return each.presets[flavor]
    # "8B" selects "3.1-8B"
    parts = [preset for full, preset in family.presets.items() if flavor in full.split("-")]
    if len(parts) != 1:
        raise ConfigError(
            f"model.flavor: family '{name}' has no flavor "
            f"'{flavor}'{_nearest(flavor, family.presets)}"
        )
    return parts[0]


def _given_overrides(section: ModelSection) -> dict[str, Any]:
    """Return the values set in `[model.overrides]`; `rope_scaling`, if any of its fields is set, is
    a dictionary of these.
    """
    given: dict[str, Any] = asdict(section.overrides)  # type: ignore[call-overload]
    given["rope_scaling"] = {
        key: value for key, value in given["rope_scaling"].items() if value is not None
    } or None
    return {key: value for key, value in given.items() if value is not None}


def _override_rope_scaling(config: ModelConfig, given: Mapping[str, Any]) -> RopeScaling:
    """Return the scaling of `config` with the values `given`, or a new one if they name another
    type.

    Raises ConfigError: values are missing, or the type does not have them.
    """
    now = config.rope_scaling
    rope_type = given.get("rope_type", None if now is None else now.rope_type)
    if rope_type is None:
        raise ConfigError(
            "model.overrides.rope_scaling: rope_type is missing. Set it, for example to 'yarn'."
        )
    names = ROPE_FIELDS[rope_type]
    base = now if now is not None and now.rope_type == rope_type else None
    known = names if base else (*given, *OPTIONAL_ROPE_FIELDS)
    missing = [name for name in names if name not in known]
    foreign = [name for name in given if name not in ("rope_type", *names)]
    problems = [f"{name} is missing, which '{rope_type}' needs. Set it." for name in missing]
    problems += [f"{name} means nothing for '{rope_type}'. Leave it out." for name in foreign]
    scaling = replace(base or RopeScaling(), **given)
    if scaling.mscale is not None and scaling.mscale_all_dim is None and not foreign:
        problems.append("mscale has no effect without mscale_all_dim. Set both, or none.")
    raise_problems(ConfigError, "model.overrides.rope_scaling", problems)
    return scaling


def _apply_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    expressible = {*families()[config.family].keys, "rope_theta", "rope_scaling"}
    if "rope_scaling" in overrides:
        overrides = {
            **overrides,
            "rope_scaling": _override_rope_scaling(config, overrides["rope_scaling"]),
        }
    problems = [
        f"overrides.{key} = {value!r}: every {config.family} has {getattr(config, key)!r}, and its "
        "Hugging Face model could not express another value. Leave it out, or choose another "
        "family."
        for key, value in overrides.items()
        if key not in expressible and value != getattr(config, key)
    ]
    config = replace(config, **overrides)
    raise_problems(ConfigError, "model", [*problems, *families()[config.family].check(config)])
    return config


def model_config_from_hf(folder: Path, where: str = "model.hf_assets_path") -> ModelConfig:
    """Read the sizes from `folder`/config.json; `where` is the origin of `folder` in errors.

    Raises:
        NotNativeError: the model has a feature that the decoder cannot express.
        ConfigError: the file is missing or not JSON, or a key is missing.
    """
    hf = _read_config(folder, where)
    model_type = hf.get("model_type")
    family = find_family(model_type)
    if family is None:
        raise NotNativeError(
            f"{_config_file(folder)}: model_type '{model_type}' has no native decoder; there are "
            f"{list_names(families())}."
        )
    return family.from_hf(hf, str(_config_file(folder)))


def any_model_config_from_hf(
    folder: Path, where: str, implementation: str = "auto"
) -> AnyModelConfig:
    """Read the native decoder's configuration from `folder`/config.json or, if the decoder cannot
    express it, transformers'.

    Raises ConfigError: as `resolve_model_config`.
    """
    why = _ASKED_FOR
    if implementation != "transformers":
        try:
            return model_config_from_hf(folder, where)
        except NotNativeError as error:
            if implementation == "native":
                raise
            why = str(error)
    return transformers_config(_read_config(folder, where), str(_config_file(folder)), why)


def _config_file(folder: Path) -> Path:
    return folder if folder.suffix == ".json" and not folder.is_dir() else folder / "config.json"


def _read_config(folder: Path, where: str = "model.hf_assets_path") -> dict[str, Any]:
    path = _config_file(folder)
    try:
        hf = read_json(path)
    except FileNotFoundError:
        if (folder / "adapter_config.json").exists():
            raise ConfigError(
                f"{where}: {folder} holds adapters (LoRA) without their model. Give the model, or "
                f"merge them first: python -m titanlite export {folder} OUT --merge."
            ) from None
        raise ConfigError(f"{where}: {path} does not exist. {suggest_path(where)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}."
        ) from None
    return hf if isinstance(hf, dict) else {}


def _nearest(name: str, known: Mapping[str, object]) -> str:
    return f".{suggest(name, known)} There are: {list_names(known)}."

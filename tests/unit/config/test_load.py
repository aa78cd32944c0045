"""From arguments and TOML to a JobConfig, what is refused with which key, and the way back through
save_resolved.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from files import error_of
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from processes import run_python

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig, find_changes, format_changes, load_config, save_resolved
from titanlite.config.check import check_values, find_ignored
from titanlite.config.defaults import fill_in
from titanlite.config.settings import get_settings, get_value

# Tests share a busy machine: nothing here is timed.
PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])

ROOT = Path(__file__).parents[3]
BASE = '[model]\nflavor = "30B-A3B"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a good base.toml, so that messages hold short relative names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An absolute good file, for property tests (hypothesis wants fixtures that live longer than
    one example).
    """
    path = tmp_path_factory.mktemp("base") / "base.toml"
    path.write_text(BASE, encoding="utf-8")
    return str(path)


def write(text):
    """Write x.toml with a good model section and `text`; return the argument that names it."""
    Path("x.toml").write_text(BASE + text, encoding="utf-8")
    return "--config=x.toml"


def refuse(*argv):
    """The text of the error that `argv` gives."""
    return error_of(ConfigError, load_config, argv)


# Files


@pytest.mark.parametrize(
    "argv",
    [
        ["--config=base.toml"],
        ["--job.config_file=base.toml"],
        ["--training.steps=1000", "--config", "base.toml"],
    ],
)
def test_spellings_of_the_file_flag(argv):
    assert load_config(argv).model.flavor == "30B-A3B"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config: names no file. Write --config FILE once."),
        (["--config=base.toml", "--config=b.toml"], "--config: names 2 files (base.toml, b.toml)."),
        (["--config", "bsae.toml"], "bsae.toml: no such file. Did you mean 'base.toml'?"),
        (["--config", "."], ".: it is a folder."),
    ],
)
def test_wrong_file_argument(argv, message):
    assert refuse(*argv).startswith(message)


# Overrides


@pytest.mark.parametrize("text", ["off", "0123", "", "none", "a=b"])
def test_str_override_is_the_raw_text(text):
    assert load_config(["--config=base.toml", f"--job.description={text}"]).job.description == text
    assert load_config(["--config=base.toml", "--job.description", text]).job.description == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("--training.steps=1_000", 1000),
        ("--training.steps=+0100", 100),
        ("--optimizer.lr=.5", 0.5),
        ("--compile.enable=on", True),
        ("--lr_scheduler.decay_ratio=none", None),
    ],
)
def test_override_is_read_by_the_declared_type(override, value):
    key, _, text = override.removeprefix("--").partition("=")
    for argv in ([override], [f"--{key}", text]):
        found = get_value(load_config(["--config=base.toml", *argv]), key)
        assert found == value
        assert type(found) is type(value)


def test_override_wins_over_the_file_and_the_last_one_over_others():
    file = write("[training]\nsteps = 1\nmax_norm = 2\n[lr_scheduler]\ndecay_ratio = 0.5\n")
    overrides = "--training.steps=2", "--lr_scheduler.decay_ratio=none", "--training.steps", "3"
    job = load_config([file, *overrides])
    assert job.training.steps == 3 and type(job.training.max_norm) is float
    assert job.lr_scheduler.decay_ratio is None


@pytest.mark.parametrize("argument", ["junk", "--", "", "-training.steps=5"])
def test_positional_arguments_are_refused(argument):
    message = f"argument {argument!r}: unknown. Write --section.key=value."
    assert refuse("--config=base.toml", argument) == message


def test_help_prints_usage_and_leaves(capsys):
    with pytest.raises(SystemExit) as leave:
        load_config(["--training.step=5", "--help"])
    assert leave.value.code == 0
    assert capsys.readouterr().out.startswith("usage: --config FILE [--section.key=value ...]\n")


# Problems together


def test_all_problems_come_in_one_error():
    file = write("[training]\nstep = 5\nsteps = -1\nseq_len = 'long'\n[optimizer]\neps = 0\n")
    message = refuse(file, "junk", "--optimizer.lr=-1", "--compile.enable=maybe")
    problems = [
        "argument 'junk'",
        "x.toml: unknown key 'training.step'",
        'x.toml: training.seq_len = "long"',
        # training.steps = -1 is not reported: its key may be what training.step was meant for.
        "override '--compile.enable=maybe'",
        "override '--optimizer.lr=-1': optimizer.lr = -1.0 is out of range. Set it to more than 0",
        "x.toml: optimizer.eps = 0.0 is out of range. Set it to more than 0.",
    ]
    first, *lines = message.splitlines()
    assert first == "configuration: 6 problems:"
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"  {problem}")


# Properties


def values_of(setting):
    """Values that the setting's type allows, in range or not."""
    if setting.choices or setting.calls:
        extensions = [] if setting.calls is None else ["a.b:c"]
        values = st.sampled_from([*(setting.choices or [""]), *extensions])
    else:
        values = {
            bool: st.booleans(),
            int: st.integers(1, 2**63 - 1) | st.integers(-(2**63), 2**63 - 1),
            float: st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False),
            str: st.text().filter(lambda text: "${" not in text and text != "???"),
        }[setting.kind]
    return st.none() | values if setting.optional else values


assignments = st.lists(
    st.sampled_from(list(get_settings().values())).flatmap(
        lambda setting: st.tuples(st.just(setting), values_of(setting))
    ),
    unique_by=lambda assignment: assignment[0].key,
    max_size=20,
)


def build_job(chosen):
    """The job of BASE with the chosen values, without those that `check_values` refuses."""
    job = JobConfig()
    job.model.flavor = "30B-A3B"
    for setting, value in chosen:
        section = get_value(job, setting.section)
        before = getattr(section, setting.name)
        setattr(section, setting.name, value)
        if check_values(job):
            setattr(section, setting.name, before)
    given = {setting.key: "override" for setting, _ in chosen}
    assume(not fill_in(job, given, "base") and not find_ignored(job, given))
    # then they are not written
    job.training.steps = job.training.steps if not job.training.epochs else 1000
    return job


EVERY_CONTROL = "".join(map(chr, range(0x21))) + '\x7f\x80\u2028\U0001f600"\\'


@PROPERTY
@given(chosen=assignments)
@example(chosen=[(get_settings()["job.description"], EVERY_CONTROL)])
@example(chosen=[(get_settings()["optimizer.lr"], 5e-324)])
def test_saved_configuration_loads_equal(base, chosen):
    job = build_job(chosen)
    path = Path(base).parent / "new" / "resolved.toml"
    save_resolved(job, path)
    assert load_config(["--config", str(path)]) == job


def test_changes_since_a_configuration_was_saved(folder):
    path = folder / "resolved.toml"
    arguments = ["--config=base.toml", "--model.overrides.num_layers=4"]
    arguments += ["--data.dataset=text", "--data.sources.a.path=x"]
    job = load_config(arguments)
    assert find_changes(job, path) == {}, "there is no such file"
    save_resolved(job, path)
    assert find_changes(job, path) == {}
    arguments += [
        "--optimizer.lr=1e-5",
        "--model.overrides.num_layers=none",
        "--data.sources.a.path=y",
    ]
    other = load_config([*arguments, "--data.sources.b.path=z"])
    assert {*format_changes(find_changes(other, path)).split(", ")} == {
        f"optimizer.lr {job.optimizer.lr} -> 1e-05",
        "model.overrides.num_layers 4 -> unset",
        'data.sources.a.path "x" -> "y"',
        'data.sources.b.path unset -> "z"',
    }
    path.write_text("[training]\nunheard_of = 1\n", encoding="utf-8")
    assert find_changes(other, path) == {}, "of another version"


@PROPERTY
@given(setting=st.sampled_from(list(get_settings().values())), data=st.data())
def test_any_value_is_the_same_as_an_override(base, setting, data):
    job = build_job([(setting, data.draw(values_of(setting)))])
    value = get_value(job, setting.key)
    text = (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    assume("\x00" not in text)  # no argument of a process holds one
    assert load_config(["--config", base, f"--{setting.key}={text}"]) == job


@PROPERTY
@given(setting=st.sampled_from(list(get_settings().values())), text=st.text(max_size=20))
def test_no_override_text_escapes_as_another_error(base, setting, text):
    try:
        value = get_value(load_config(["--config", base, f"--{setting.key}={text}"]), setting.key)
    except ConfigError as error:
        assert f"--{setting.key}=" in str(error)
    else:
        assert (value is None and setting.optional) or type(value) is setting.kind


# Import


def test_import_is_light():
    code = (
        "import sys, json; before = set(sys.modules); import titanlite.config; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    added = set(json.loads(run_python(code, env=environment, check=True).stdout))
    assert "titanlite" in added
    # So neither torch nor transformers, nor anything else that is slow or that machines with GPUs
    # may not have.
    assert added - set(sys.stdlib_module_names) == {"titanlite"}

"""What a process prepares for its diagnosis, and what a user reads when torch refuses something."""

from dataclasses import replace

import pytest
import torch

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.features.diagnose import process
from titanlite.features.diagnose.process import (
    explain_refusal,
    make_deterministic,
    start_flight_recorder,
    use_flash_attention_3,
)
from titanlite.models.families import families

# ---- compilation


def graph_break(x):
    print("a side effect")
    return x


def mistake(x):
    return x @ torch.ones(3, 3)


def raised_by(function):
    torch.compiler.reset()
    with pytest.raises(Exception) as found:
        torch.compile(function, fullgraph=True)(torch.ones(2, 2))
    return found.value


@pytest.mark.parametrize(
    ("function", "reason"), [(graph_break, "`print`"), (mistake, "[2, 2] X [3, 3]")]
)
def test_code_that_cannot_be_traced_is_named(function, reason):
    explained = str(explain_refusal(raised_by(function)))
    assert (
        explained.startswith("compile.enable: torch cannot compile a layer: ")
        and reason in explained
    )
    line = function.__code__.co_firstlineno + 1
    assert f" (in {function.__name__}, {__file__}:{line}). Change that code" in explained


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))}):
        explained = str(explain_refusal(raised_by(lambda x: x.sin() + x.cos())))
    assert "No working C++ compiler found" in explained
    assert explained.endswith(
        "Install one (Debian and Ubuntu: apt install g++), or set compile.enable = false."
    )


# ---- kernels of attention

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU with FlashAttention 3; what torch was told."""
    told = []
    attention = torch.nn.attention
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setattr(process, "_try_attention", lambda *_: told.append("tried"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
    monkeypatch.setattr(attention, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: told.append("restored"))
    return told


FLASH_CONFIG = families()["qwen3"].presets["0.6B"]


def test_flash_attention_3_serves_hopper_once_it_was_tried(hopper, caplog):
    with caplog.at_level("INFO", "titanlite"):
        use_flash_attention_3(JobConfig(), FLASH_CONFIG, CUDA)
    assert hopper == ["FA3", "tried"] and "FlashAttention 3, of flash_attn_interface" in caplog.text


@pytest.mark.parametrize("why", ["ampere", "package", "cpu", "deterministic", "backend", "heads"])
def test_flash_attention_2_stays(hopper, monkeypatch, why):
    job, config, device = JobConfig(), FLASH_CONFIG, torch.device("cpu") if why == "cpu" else CUDA
    if why == "ampere":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    elif why == "package":
        monkeypatch.setattr(process, "find_spec", lambda name: None)
    elif why == "deterministic":
        job.training.deterministic = True
    elif why == "backend":
        job.model.attention_backend = "sdpa"
    elif why == "heads":
        config = replace(config, head_dim=12)
    use_flash_attention_3(job, config, device)
    assert hopper == []


# ---- deterministic operations


def test_off_changes_nothing(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", called.append)
    make_deterministic(JobConfig())
    assert called == []


def test_an_environment_that_forbids_it_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on: pytest.fail("refused before")
    )
    job = JobConfig()
    job.training.deterministic = True
    with pytest.raises(
        ConfigError,
        match=r"training\.deterministic: the environment has CUBLAS_WORKSPACE_CONFIG=:0:0",
    ):
        make_deterministic(job)


def test_an_operation_without_a_deterministic_form_is_named():
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, ..."
    )
    explained = explain_refusal(error)
    assert str(explained).startswith(
        "training.deterministic: cumsum_cuda_kernel has no deterministic form on this device. Set"
    )
    assert explain_refusal(RuntimeError("something else")) is None


# ---- the flight recorder


@pytest.fixture
def environment(monkeypatch):
    """The variables of a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("os.environ", variables := {})
    return variables


def of_torch(environment):
    # pytest sets one, too
    return {name: value for name, value in environment.items() if name.startswith("TORCH")}


def test_dumps_go_into_the_folder_of_the_run(tmp_path, environment):
    start_flight_recorder(tmp_path / "run")
    folder = tmp_path / "run" / "flight_recorder"
    assert folder.is_dir()
    assert of_torch(environment) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_user_set_stays(tmp_path, environment, name):
    environment |= {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    start_flight_recorder(tmp_path)
    assert environment.pop("TORCH_FR_BUFFER_SIZE") == "2000"
    assert of_torch(environment) == {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

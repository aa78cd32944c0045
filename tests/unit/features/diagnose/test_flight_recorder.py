from pathlib import Path

import pytest
import torch

from titanlite.features.diagnose.process import start_flight_recorder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("os.environ", variables := {})
    return variables


def of_torch(environment: dict[str, str]) -> dict[str, str]:
    # pytest sets one, too
    return {name: value for name, value in environment.items() if name.startswith("TORCH")}


def test_dumps_go_into_the_folder_of_the_run(tmp_path: Path, environment: dict[str, str]):
    start_flight_recorder(tmp_path / "run")
    folder = tmp_path / "run" / "flight_recorder"
    assert folder.is_dir()
    assert of_torch(environment) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_user_set_stays(tmp_path: Path, environment: dict[str, str], name: str):
    environment |= {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    start_flight_recorder(tmp_path)
    assert environment.pop("TORCH_FR_BUFFER_SIZE") == "2000"
    assert of_torch(environment) == {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def test_torch_reads_these_names():
    """NCCL is not in the CPU build, but its header and the flight recorder are in every one."""
    folder = Path(torch.__file__).parent
    header = (folder / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    recorder = (folder / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp").read_text()
    library = (folder / "lib/libtorch_cpu.so").read_bytes()
    assert '"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"' in recorder
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in header
    assert b"TORCH_FR_DUMP_TEMP_FILE" in library


def test_there_is_none_without_a_gpu(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start_flight_recorder(tmp_path)
    assert not of_torch(environment) and not list(tmp_path.iterdir())
